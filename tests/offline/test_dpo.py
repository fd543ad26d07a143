"""What TRL has no answer for in DPO and its kin: label smoothing, RSO's and SLiC's losses, independence of micro-batches, data layouts."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from conveyor.algorithms.pair_losses import QUANTILES
from conveyor.config.offline import REFERENCE_FREE, PairLoss
from conveyor.offline.run import read_task
from tests.offline.conftest import EVEN, Prepare, Updates, alone, same

ROWS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
    {"prompt": "name a colour", "chosen": "red", "rejected": "7"},
    {"prompt": "?", "chosen": "yes indeed", "rejected": "no"},
    {"prompt": "say it twice", "chosen": "it it", "rejected": "it it it it"},
    {"prompt": "end", "chosen": ".", "rejected": "!"},
]


def log_sigmoid(x: float) -> float:
    return -float(np.logaddexp(0, -x))


def weight_decides(settings: dict[str, Any], reference: Path) -> dict[str, Any]:
    return {"dpo": settings} | ({} if settings["loss"] in REFERENCE_FREE else {"reference": {"path": str(reference)}})


@pytest.mark.parametrize("loss", get_args(PairLoss))
def test_case_1_the_loss_does_not_depend_on_micro_batches(prepare: Prepare, updates: Updates, reference: Path, loss: str) -> None:
    """Neither the quantiles of aot nor the NLL term, whose denominator is tokens while the others count pairs."""
    settings = weight_decides({"loss": loss, "beta": 0.4, "nll_coef": 0.5}, reference)
    rows = EVEN if loss in QUANTILES else ROWS
    (whole,), _ = updates(prepare("dpo", rows, train={"micro_batch_size": len(rows)}, **settings))
    (cut,), _ = updates(prepare("dpo", rows, train={"micro_batch_size": 2}, **settings))
    same(cut, whole.loss, whole.gradient)
    assert cut.row["grad_norm"] == pytest.approx(whole.row["grad_norm"], rel=1e-5)
    for name in ("loss/nll", "rewards/margin", "rewards/accuracy", "logprobs/rejected"):
        assert cut.row[name] == pytest.approx(whole.row[name], rel=1e-5)


BY_HAND: dict[str, tuple[dict[str, Any], Callable[[float, float], float]]] = {
    "cDPO": ({"loss": "sigmoid", "beta": 0.4, "label_smoothing": 0.2},
             lambda delta, _: -0.8 * log_sigmoid(0.4 * delta) - 0.2 * log_sigmoid(-0.4 * delta)),
    "RSO sigmoid-norm": ({"loss": "sigmoid", "beta": 0.5}, lambda delta, _: math.log1p(math.exp(-0.5 * delta))),
    "RSO hinge-norm": ({"loss": "hinge", "beta": 1.0}, lambda delta, _: max(0.0, 1 - delta)),
    "SLiC": ({"loss": "slic", "margin": 1.5, "nll_coef": 0.0}, lambda _, gap: max(0.0, 1.5 - gap)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(prepare: Prepare, updates: Updates, policy: Path, reference: Path, name: str) -> None:
    """From the log-probs of every sample alone: gap = log π(w) − log π(l), delta = gap less the reference's."""
    settings, formula = BY_HAND[name]
    (update,), task = updates(prepare("dpo", ROWS, **weight_decides(settings, reference)))
    samples = list(task.samples)
    ours, theirs = np.array(alone(policy, samples)), np.array(alone(reference, samples))
    gaps, deltas = ours[:5] - ours[5:], (ours - theirs)[:5] - (ours - theirs)[5:]
    wanted = [formula(delta, gap) for delta, gap in zip(deltas, gaps, strict=True)]
    assert update.loss == pytest.approx(np.mean(wanted), abs=1e-5)
    assert (0 in wanted) == (name in ("RSO hinge-norm", "SLiC")), "both sides of the hinge are met"


def test_aot_compares_pairs_of_equal_rank(prepare: Prepare, updates: Updates, policy: Path, reference: Path) -> None:
    """The policy's difference of each pair with the reference's of equal rank, which is another pair's here."""
    (update,), task = updates(prepare("dpo", EVEN, dpo={"loss": "aot", "beta": 0.4}, reference={"path": str(reference)}))
    n = len(EVEN)
    ours, theirs = (np.subtract(found[:n], found[n:]) for found in (alone(policy, task.samples), alone(reference, task.samples)))
    assert (ours.argsort() != theirs.argsort()).any()
    wanted = [-log_sigmoid(0.4 * difference) for difference in np.sort(ours) - np.sort(theirs)]
    assert update.loss == pytest.approx(np.mean(wanted), abs=1e-5)


def test_slic_regularises_with_the_chosen_completions_nll(prepare: Prepare, updates: Updates, policy: Path) -> None:
    """−log p a token of the chosen completions, with weight 1 unless the recipe says otherwise."""
    (update,), task = updates(prepare("dpo", ROWS, dpo={"loss": "slic"}))
    chosen = list(task.samples)[:5]
    nll = -sum(alone(policy, chosen)) / sum(int(sample.mask.sum()) for sample in chosen)
    assert update.row["loss/nll"] == pytest.approx(nll, rel=1e-5)
    assert update.loss == pytest.approx(update.row["loss/pairs"] + nll, rel=1e-5)


def test_a_policy_that_is_its_reference_has_loss_log_2(prepare: Prepare, updates: Updates) -> None:
    (update,), _ = updates(prepare("dpo", ROWS))
    assert update.loss == pytest.approx(math.log(2), abs=1e-6)
    assert update.row["rewards/margin"] == pytest.approx(0, abs=1e-5)


def test_dpo_learns(prepare: Prepare, updates: Updates, reference: Path) -> None:
    steps, _ = updates(prepare("dpo", ROWS, train={"steps": 8, "learning_rate": 3e-3}), 8)
    assert steps[-1].row["rewards/accuracy"] == 1.0 and steps[-1].loss < 0.6 < steps[0].loss


@pytest.mark.parametrize("method", ["dpo", "reward_model", "kto"])
def test_case_9_three_layouts_are_one_dataset(prepare: Prepare, method: str) -> None:
    say = lambda role, text: {"role": role, "content": text}  # noqa: E731
    chats = [
        {side: [say("user", row["prompt"]), say("assistant", row[side])] for side in ("chosen", "rejected")} for row in ROWS
    ]  # implicit prompt
    beside = [
        {"messages": [say("user", row["prompt"])]} | {side: [say("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in ROWS
    ]
    told = []
    for rows in (ROWS, chats, beside):
        samples = read_task(prepare(method, rows))[0].samples
        told.append(json.dumps([[sample.ids.tolist(), sample.mask.tolist()] for sample in samples]))
    assert told[0] == told[1] == told[2]
