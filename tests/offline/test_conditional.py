"""Conditional SFT: what prompts say, what a class weighs, what is told to inference."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from conveyor.config import UserError
from conveyor.offline import fit as fit_module
from conveyor.offline.run import check_offline, read_task, run_offline
from tests.offline.conftest import Prepare, Updates, alone, flat

SCORED = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}", "reward": reward} for i, reward in enumerate([0.0, 1.0, 2.0, 5.0])]
"""Mean 2, deviation √3.5."""
CLASSES = {"expert": {"text": "Good", "weight": 1.0}, "rough": {"text": "Bad", "weight": 0.1}}


def sourced(*names: str) -> list[dict]:
    return [row | {"class": name} for row, name in zip(SCORED, names, strict=False)]


def prompts(task: object, policy: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    return [tokenizer.decode(sample.ids[: sample.prompt_length]) for sample in task.samples]


def test_prompts_say_the_normalised_rounded_score(prepare: Prepare, policy: Path) -> None:
    task, *_ = read_task(prepare("conditional_sft", SCORED, data={"packing": False}))
    scores = [(reward - 2) / np.sqrt(3.5) for reward in (0, 1, 2, 5)]
    assert [f"{score:.1f}" for score in scores] == ["-1.1", "-0.5", "0.0", "1.6"]
    assert prompts(task, policy) == [f"<s><|user|>{i}+{i}= [{score:.1f}]<|assistant|>" for i, score in enumerate(scores)]


def test_the_normalisation_is_fitted_on_training_rows_and_told_to_inference(prepare: Prepare, policy: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "x", "completion": "y", "reward": 9.0}) + "\n")
    recipe = prepare("conditional_sft", SCORED, data={"packing": False, "eval_path": str(held_out)}, condition={"decimals": 2})
    _, held, _ = read_task(recipe)
    assert prompts(held, policy) == [f"<s><|user|>x [{7 / np.sqrt(3.5):.2f}]<|assistant|>"]
    last = run_offline(recipe)
    assert np.isfinite(last["eval/loss"])
    told = json.loads((tmp_path / "run/model/condition.json").read_text())
    assert told["prompt_template"] == "{prompt} [1.00]"
    assert (told["condition"]["kind"], told["condition"]["mean"]) == ("score", 2.0)
    assert told["condition"]["std"] == pytest.approx(np.sqrt(3.5))


@pytest.mark.parametrize(("target", "template"), [(None, "Good: {prompt}"), ("rough", "Bad: {prompt}")])
def test_the_condition_of_inference_is_the_heaviest_class_or_the_one_named(
    prepare: Prepare, tmp_path: Path, target: str | None, template: str
) -> None:
    condition = {"kind": "class", "classes": CLASSES, "template": "{condition}: {prompt}", "target": target}
    run_offline(prepare("conditional_sft", sourced("expert", "rough"), condition=condition))
    assert json.loads((tmp_path / "run/model/condition.json").read_text())["prompt_template"] == template


def test_other_methods_leave_no_condition(prepare: Prepare, tmp_path: Path) -> None:
    run_offline(prepare("sft", SCORED))
    assert not (tmp_path / "run/model/condition.json").exists()


@pytest.mark.parametrize("packing", [False, True])
def test_c_rlft_s_loss_is_the_weighted_sum(prepare: Prepare, updates: Updates, policy: Path, packing: bool) -> None:
    """−Σ w_c log π(y | x, c) over the learnt tokens of the update, whatever the micro-batches and packed rows."""
    condition = {"kind": "class", "classes": CLASSES}
    recipe = prepare(
        "conditional_sft", sourced("expert", "rough", "rough", "expert"), condition=condition,
        data={"packing": packing}, train={"micro_batch_size": 1},
    )  # fmt: skip
    (update,), task = updates(recipe)
    samples = list(task.samples)
    weights = [weighted.weight for row in task.items for weighted in row]
    assert sorted(weights) == [0.1, 0.1, 1.0, 1.0]
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    assert update.loss == pytest.approx(-np.dot(weights, alone(policy, samples)) / tokens, abs=1e-5)


def test_a_class_of_weight_a_tenth_has_a_tenth_of_the_gradient(prepare: Prepare, updates: Updates) -> None:
    found = []
    for weight in (1.0, 0.1):
        condition = {"kind": "class", "classes": {"expert": {"text": "Good", "weight": weight}}}
        (update,), _ = updates(prepare("conditional_sft", sourced(*["expert"] * 4), condition=condition))
        found.append(flat(update.gradient))
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], 0.1 * found[0], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "condition", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], {}, r"rows.jsonl:1: reward: missing"),
        ([*SCORED[:2], SCORED[2] | {"reward": "much"}], {}, r"rows.jsonl:3: reward: "),
        ([SCORED[0]] * 2, {}, r"rows.jsonl: reward is 0 in every row: there is nothing to condition on"),
        (sourced("novice"), {"kind": "class", "classes": CLASSES}, r"rows.jsonl:1: class: unknown class 'novice'; one of expert, rough"),
        (SCORED[:1], {"kind": "class", "classes": CLASSES}, r"rows.jsonl:1: class: missing"),
    ],
)
def test_bad_rows_stop_before_a_model_is_loaded(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, rows: list[dict], condition: dict, message: str
) -> None:
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    for act in (check_offline, run_offline):
        with pytest.raises(UserError, match=message) as caught:
            act(prepare("conditional_sft", rows, condition=condition))
        assert "\n" not in str(caught.value)
