"""KTO's KL term and BCO's running shift, recomputed from the log-probs of every sample alone; case 12."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from conveyor.config import UserError
from conveyor.data.unpaired import mismatch
from conveyor.offline import fit as fit_module
from conveyor.offline.run import check_offline, read_task, run_offline
from conveyor.run_folder import RunFolder
from conveyor.workers.fit import fit_here
from tests.offline.conftest import Prepare, Updates, alone, same

ROWS = [
    {"prompt": "1+1=", "completion": "2", "label": True},
    {"prompt": "1+1=", "completion": "three", "label": False},
    {"prompt": "?", "completion": "yes indeed", "label": True},
    {"prompt": "name a colour", "completion": "red", "label": True},
    {"prompt": "name a colour", "completion": "7", "label": False},
    {"prompt": "say it", "completion": "it it", "label": False},
    {"prompt": "end", "completion": ".", "label": True},
]
SIGNS = np.array([1.0 if row["label"] else -1.0 for row in ROWS])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("method", ["kto", "bco"])
def test_case_1_the_loss_does_not_depend_on_micro_batches(prepare: Prepare, updates: Updates, reference: Path, method: str) -> None:
    """The KL and the shift are of the update, and a micro-batch of one row is no special case."""
    settings = {"reference": {"path": str(reference)}, method: {"beta": 0.4, "undesirable_weight": 0.3}}
    (whole,), _ = updates(prepare(method, ROWS, train={"micro_batch_size": 7}, **settings))
    for size in (1, 3):
        (cut,), _ = updates(prepare(method, ROWS, train={"micro_batch_size": size}, **settings))
        same(cut, whole.loss, whole.gradient)
        for name in ("rewards/desirable", "rewards/undesirable", "desirable_fraction"):
            assert cut.row[name] == pytest.approx(whole.row[name], rel=1e-5)


def test_kto_by_hand_where_prompts_repeat(prepare: Prepare, updates: Updates, policy: Path, reference: Path) -> None:
    """Each prompt with the completion of the nearest row before it (round the circle) that has another prompt."""
    settings = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    (update,), task = updates(prepare("kto", ROWS, kto=settings, reference={"path": str(reference)}))
    samples = list(task.samples)
    partners = [6, 6, 1, 2, 2, 4, 5]
    crossed = [mismatch(samples[row], samples[partner]) for row, partner in enumerate(partners)]
    kl = max(0.0, np.mean(np.subtract(alone(policy, crossed), alone(reference, crossed))))
    ratios = np.subtract(alone(policy, samples), alone(reference, samples))
    wanted = np.where(SIGNS > 0, 1.5, 0.5) * (1 - sigmoid(0.4 * SIGNS * (ratios - kl)))
    assert kl > 0 and update.row["kl"] == pytest.approx(kl, abs=1e-5)
    assert update.loss == pytest.approx(wanted.mean(), abs=1e-5)
    assert update.row["rewards/desirable"] == pytest.approx(0.4 * ratios[SIGNS > 0].mean(), abs=1e-5)
    assert update.row["desirable_fraction"] == pytest.approx(4 / 7)


@pytest.mark.parametrize("prompts", [("a", "b", "c"), ("a", "a", "b"), ("a", "a", "a")])
def test_case_12_no_row_is_paired_with_itself(prepare: Prepare, prompts: tuple[str, ...]) -> None:
    rows = [{"prompt": prompt, "completion": f"answer {i}", "label": i == 0} for i, prompt in enumerate(prompts)]
    task, *_ = read_task(prepare("kto", rows))
    own = [sample.ids.tolist() for sample in task.samples]
    crossed = [sample.ids.tolist() for sample in task.surveyed([0, 1, 2])]
    assert len(crossed) == 3 and not any(one in own for one in crossed if len(set(prompts)) == 3)
    completions = [ids[task.items[i].sample.prompt_length :] for i, ids in enumerate(own)]
    for i, ids in enumerate(crossed):
        prompt = own[i][: task.items[i].sample.prompt_length]
        assert ids[: len(prompt)] == prompt and ids[len(prompt) :] in completions[:i] + completions[i + 1 :]


def test_case_12_one_row_alone_is_a_clear_error(prepare: Prepare) -> None:
    seven = prepare("kto", ROWS, train={"train_batch_size": 3})  # 3, 3 and 1
    with pytest.raises(UserError, match=r"train_batch_size: an update would have one row, .* set data.drop_last") as caught:
        check_offline(seven)
    assert "\n" not in str(caught.value)
    assert check_offline(prepare("kto", ROWS, train={"train_batch_size": 3}, data={"drop_last": True}))["updates"] == 2
    assert check_offline(prepare("kto", ROWS, train={"train_batch_size": 3}, kto={"loss": "apo_zero_unpaired"}))["updates"] == 3


def test_a_crossed_pair_is_cut_to_the_length_samples_may_have(prepare: Prepare) -> None:
    rows = [{"prompt": "p" * 40, "completion": "c", "label": True}, {"prompt": "p", "completion": "c" * 40, "label": False}]
    task, *_ = read_task(prepare("kto", rows, data={"max_length": 46}))
    assert sorted(len(sample.ids) for sample in task.surveyed([0, 1])) == [6, 46]


def test_bco_s_shift_runs_over_three_updates(prepare: Prepare, updates: Updates, reference: Path) -> None:
    """δ = ½(mean reward of desirable + of undesirable rows) over all updates so far, this one included, each under the policy it had."""
    recipe = prepare(
        "bco", ROWS, bco={"beta": 0.4, "desirable_weight": 1.5}, reference={"path": str(reference)},
        train={"train_batch_size": 3, "micro_batch_size": 2, "learning_rate": 1e-2},
    )  # fmt: skip
    steps, task = updates(recipe, 3)
    samples, theirs = list(task.samples), np.array(alone(reference, task.samples))
    model = AutoModelForCausalLM.from_pretrained(reference)
    rewards = np.zeros(7)
    for update, rows in zip(steps, ([0, 1, 2], [3, 4, 5], [6]), strict=True):
        model.load_state_dict(update.weights)
        rewards[rows] = 0.4 * (np.array(alone(model, [samples[row] for row in rows])) - theirs[rows])
        seen = np.arange(7) <= rows[-1]
        shift = (rewards[seen & (SIGNS > 0)].mean() + rewards[seen & (SIGNS < 0)].mean()) / 2
        weights = np.where(SIGNS[rows] > 0, 1.5, 1.0)
        assert update.loss == pytest.approx((weights * np.logaddexp(0, -SIGNS[rows] * (rewards[rows] - shift))).mean(), abs=1e-5)
    assert abs(shift) > 0.1, "the shift matters here"


def test_bco_resumed_is_bco_that_never_stopped(prepare: Prepare, reference: Path) -> None:
    """Equal to the last digit: the shift's sums go into the checkpoint."""
    settings = dict(
        reference={"path": str(reference)}, checkpoint={"every": 1, "keep": 3, "resume": True},
        train={"train_batch_size": 3, "learning_rate": 1e-2},
    )  # fmt: skip
    recipe = prepare("bco", ROWS, **settings)
    work = read_task(recipe)
    folder = RunFolder.open(recipe)
    whole = [row["loss"] for row in fit_here((recipe, *work, 0))]
    states = [json.loads((folder.checkpoints / f"step_{step}/task.json").read_text()) for step in (1, 2, 3)]
    assert [state["desirable_count"] + state["undesirable_count"] for state in states] == [3, 6, 7]
    for start in (1, 2):
        assert [row["loss"] for row in fit_here((recipe, *work, start))] == whole[start:]
        assert json.loads((folder.checkpoints / "step_3/task.json").read_text()) == states[-1]


@pytest.mark.parametrize("method", ["kto", "bco"])
def test_it_learns_to_tell_them_apart(prepare: Prepare, updates: Updates, method: str) -> None:
    """From pairs too: each gives a desirable row and an undesirable one."""
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "bad"} for row in ROWS]
    steps, task = updates(prepare(method, pairs, train={"steps": 6, "learning_rate": 3e-3}), 6)
    assert len(task.items) == 14
    assert steps[-1].loss < steps[0].loss
    assert steps[-1].row["rewards/desirable"] > steps[-1].row["rewards/undesirable"]


def test_one_kind_of_label_trains_with_a_warning(prepare: Prepare, caplog: pytest.LogCaptureFixture) -> None:
    last = run_offline(prepare("kto", [row for row in ROWS if row["label"]]))
    assert "every sample is labelled true" in caplog.text
    assert np.isfinite(last["loss"]) and last["desirable_fraction"] == 1.0


@pytest.mark.parametrize("method", ["kto", "bco"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, r"rows.jsonl:2: label: missing"),
        ({"prompt": "a", "completion": "b", "label": 1}, r"rows.jsonl:2: label: must be true or false, not 1"),
        ({"prompt": "a", "label": True}, r"rows.jsonl:2: completion: missing"),
    ],
)
def test_bad_rows_stop_before_a_model_is_loaded(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, method: str, row: dict, message: str
) -> None:
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    with pytest.raises(UserError, match=message):
        run_offline(prepare(method, [ROWS[0], row]))
