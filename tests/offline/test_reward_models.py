"""Reward models of whole completions and of steps, recomputed by transformers' own classifier; cases 10 and 11."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conveyor.config import UserError
from conveyor.data.packing import lay_out
from conveyor.models.process_scores import step_scores
from conveyor.offline import fit as fit_module
from conveyor.offline.run import check_offline, read_task, run_offline
from tests.offline.conftest import Prepare, Updates, same

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three", "margin": 0.5},
    {"prompt": "a colour", "chosen": "red", "rejected": "7", "margin": 1.5},
    {"prompt": "?", "chosen": "yes indeed", "rejected": "no"},
]
SOLUTIONS = [
    {"prompt": "2+2*2", "completions": ["2*2=4", "2+4=6"], "labels": [True, True]},
    {"prompt": "2+2*2", "completions": ["2+2=4", "4*2=8", "8"], "labels": [False, 0.25, False]},
    {"prompt": "1+1", "completions": ["2"], "labels": [1]},
]
LABELS = np.array([1, 1, 0, 0.25, 0, 1])


@torch.no_grad()
def scores_of(model, sample, padding: str | None = None, width: int = 60) -> np.ndarray:
    """float [T]: the classifier's head at every token of a sample, alone or in a padded row of `width` tokens."""
    ids, size = torch.from_numpy(sample.ids).long(), len(sample.ids)
    before = width - size if padding == "left" else 0
    after = width - size if padding == "right" else 0
    row = torch.nn.functional.pad(ids, (before, after))[None]
    mask = torch.nn.functional.pad(torch.ones(size, dtype=torch.long), (before, after))[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(input_ids=row, attention_mask=mask, position_ids=positions).last_hidden_state
    return model.score(hidden)[0, before : before + size, 0].double().numpy()


def load(folder: Path):
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def test_label_smoothing_and_margins_by_hand(prepare: Prepare, updates: Updates, classifier: Path) -> None:
    """−0.9·log σ(d − m) − 0.1·log σ(−(d − m)) + 0.02·(r_w + r_l)²; a row without a margin has 0."""
    settings = {"label_smoothing": 0.1, "centre_coef": 0.02}
    (update,), task = updates(prepare("reward_model", PAIRS, model={"path": str(classifier)}, reward_model=settings))
    model = load(classifier)
    won = np.array([scores_of(model, pair.chosen)[-1] for pair in task.items])
    lost = np.array([scores_of(model, pair.rejected)[-1] for pair in task.items])
    d = won - lost - np.array([0.5, 1.5, 0])
    wanted = 0.9 * np.logaddexp(0, -d) + 0.1 * np.logaddexp(0, d) + 0.02 * (won + lost) ** 2
    assert update.loss == pytest.approx(wanted.mean(), abs=1e-5)
    assert update.row["margin"] == pytest.approx((won - lost).mean(), abs=1e-5)


def test_steps_by_hand(prepare: Prepare, updates: Updates, classifier: Path) -> None:
    """The mean over all 6 steps of the binary cross-entropy of σ(score at the step's end) with its label."""
    (update,), task = updates(prepare("process_reward_model", SOLUTIONS, model={"path": str(classifier)}))
    model = load(classifier)
    found = np.concatenate([scores_of(model, item.sample)[item.ends] for item in task.items])
    wanted = LABELS * np.logaddexp(0, -found) + (1 - LABELS) * np.logaddexp(0, found)
    assert update.loss == pytest.approx(wanted.mean(), abs=1e-5)
    assert update.row["accuracy"] == pytest.approx(((found > 0) == (LABELS > 0.5)).mean())


def test_case_1_steps_are_the_denominator_of_any_micro_batches(prepare: Prepare, updates: Updates, classifier: Path) -> None:
    model = {"path": str(classifier)}
    (whole,), _ = updates(prepare("process_reward_model", SOLUTIONS, train={"micro_batch_size": 3}, model=model))
    for size in (1, 2):
        (cut,), _ = updates(prepare("process_reward_model", SOLUTIONS, train={"micro_batch_size": size}, model=model))
        same(cut, whole.loss, whole.gradient)


def test_case_11_a_solution_alone_packed_or_padded_has_one_score_a_step(prepare: Prepare, classifier: Path) -> None:
    task, *_ = read_task(prepare("process_reward_model", SOLUTIONS))
    model = load(classifier)
    alone = np.concatenate([scores_of(model, item.sample)[item.ends] for item in task.items])
    for packed in (True, False):
        tokens = lay_out([item.sample.ids for item in task.items], packed)
        together = step_scores(model, tokens, [item.ends.tolist() for item in task.items])
        np.testing.assert_allclose(together.detach().numpy(), alone, atol=1e-5)
    for side in ("left", "right"):
        padded = np.concatenate([scores_of(model, item.sample, side)[item.ends] for item in task.items])
        np.testing.assert_allclose(padded, alone, atol=1e-5)


def test_case_10_a_process_reward_model_learns_and_keeps_its_head(prepare: Prepare, updates: Updates, tmp_path: Path) -> None:
    hard = [row | {"labels": [float(label) > 0.5 for label in row["labels"]]} for row in SOLUTIONS]
    first = run_offline(prepare("process_reward_model", hard, train={"steps": 1}))
    assert first["loss"] == pytest.approx(np.log(2)), "a new head of zeros"
    last = run_offline(prepare("process_reward_model", hard, train={"steps": 12, "learning_rate": 3e-3}))
    assert last["loss"] < 0.6
    kept = (tmp_path / "run").rename(tmp_path / "first") / "model"
    (again,), task = updates(prepare("process_reward_model", hard, model={"path": str(kept)}))
    model = load(kept)
    found = np.concatenate([scores_of(model, item.sample)[item.ends] for item in task.items])
    labels = LABELS > 0.5
    assert again.loss == pytest.approx(np.logaddexp(0, np.where(labels, -found, found)).mean(), abs=1e-5)


@pytest.mark.parametrize("method", ["reward_model", "process_reward_model"])
def test_case_10_a_classifier_without_its_head_is_refused(prepare: Prepare, policy: Path, tmp_path: Path, method: str) -> None:
    """It says that it is one: its scores would be random."""
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.architectures = ["LlamaForSequenceClassification"]
    model.config.num_labels = 1
    model.save_pretrained(broken)
    config = (broken / "config.json").read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    (broken / "config.json").write_text(config)
    rows = PAIRS if method == "reward_model" else SOLUTIONS
    with pytest.raises(UserError, match=r"broken: this checkpoint has no score.weight"):
        run_offline(prepare(method, rows, model={"path": str(broken), "tokenizer": str(policy)}))
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize(
    ("method", "row", "message"),
    [
        ("process_reward_model", SOLUTIONS[0] | {"labels": [True]}, r"rows.jsonl:2: labels: 1 for 2 steps"),
        ("process_reward_model", SOLUTIONS[2] | {"labels": [2]}, r"rows.jsonl:2: labels\[0\]: must be true, false or a number from 0 to 1"),
        ("process_reward_model", {"prompt": "a", "labels": [True]}, r"rows.jsonl:2: completions: missing"),
        ("process_reward_model", {"prompt": "a", "completions": ["b"]}, r"rows.jsonl:2: labels: missing"),
        ("reward_model", {"prompt": "a", "chosen": "b"}, r"rows.jsonl:2: rejected: missing"),
        ("reward_model", PAIRS[0] | {"margin": "big"}, r"rows.jsonl:2: margin: "),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, r"rows.jsonl:2: chosen and rejected are identical"),
    ],
)
def test_bad_rows_stop_before_a_model_is_loaded(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, method: str, row: dict, message: str
) -> None:
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    rows = [SOLUTIONS[0] if method == "process_reward_model" else PAIRS[0], row]
    for act in (check_offline, run_offline):
        with pytest.raises(UserError, match=message) as caught:
            act(prepare(method, rows))
        assert "\n" not in str(caught.value)
