"""Whole runs of tiny models in this process: what they compute, what they leave behind, what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conveyor.config import UserError, parse_recipe
from conveyor.offline import fit as fit_module
from conveyor.offline import run as run_module
from conveyor.offline.run import check_offline, run_offline
from conveyor.report.progress import MetricsLog, read_metrics
from conveyor.workers.fit import fit_here

SUMS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}", "level": a} for a in range(4) for b in range(5)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1} maybe"} for a in range(4) for b in range(5)]


def write_rows(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def recipe(tmp_path, tiny_policy):
    def make(method="sft", rows=None, data=None, train=None, **settings):
        rows = (SUMS if method == "sft" else PAIRS) if rows is None else rows
        raw = dict(
            method=method,
            output_dir=str(tmp_path / "run"),
            model={"path": str(tiny_policy)},
            data={"path": write_rows(tmp_path / "data.jsonl", rows), "max_length": 64, **(data or {})},
            train={"train_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3, **(train or {})},
        )
        return parse_recipe(raw | settings)

    return make


def weights(folder):
    return {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


def closest(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def fixed(rows):
    """Metrics without what depends on the clock."""
    return [{name: value for name, value in row.items() if name not in ("time/step", "tokens_per_second")} for row in rows]


def test_run_folder(recipe, tmp_path):
    last = run_offline(recipe(data={"packing": False}, train={"epochs": 2}))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(row["step"], row["epoch"], row["samples"]) for row in rows] == [
        (1, 0, 8),
        (2, 0, 8),
        (3, 0, 4),
        (4, 1, 8),
        (5, 1, 8),
        (6, 1, 4),
    ]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "time/step"} <= rows[0].keys()
    assert rows[-1] == last and rows[-1]["loss"] < rows[0]["loss"]
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["train"]["epochs"] == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run/model").pad_token_id == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "data.json", "metrics.jsonl", "model"]


@pytest.mark.parametrize("packing", [True, False])
def test_sft_loss_is_the_mean_over_learnt_tokens_of_the_update(recipe, tiny_policy, packing):
    """Recomputed sample by sample from full logits; also checks case 1, as the samples' lengths differ."""
    last = run_offline(recipe(data={"packing": packing}, train={"train_batch_size": 20, "steps": 1, "micro_batch_size": 3}))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_policy), AutoTokenizer.from_pretrained(tiny_policy)
    total, count = 0.0, 0
    for row in SUMS:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True)["input_ids"]
        answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        logprobs = model(torch.tensor([prompt + answer])).logits.detach().log_softmax(-1)[0]
        total -= sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(answer))
        count += len(answer)
    assert last["loss"] == pytest.approx(total / count, abs=1e-5)


def test_micro_batches_and_packing_change_nothing_but_speed(recipe, tmp_path):
    """Case 1: the denominator is the update's. Packed rows of all samples are one update of the same samples."""
    results = []
    for packing, micro_batch_size in [(False, 20), (False, 3), (True, 2)]:
        train = {"train_batch_size": 20, "micro_batch_size": micro_batch_size, "epochs": 3}
        run_offline(recipe(data={"packing": packing}, train=train, overwrite=True))
        results.append(weights(tmp_path / "run/model"))
    assert closest(results[0], results[1]) < 1e-5
    assert closest(results[0], results[2]) < 1e-5


def test_reward_model_learns_and_keeps_its_head(recipe, tmp_path, tiny_policy):
    first, *_, last = [
        run_offline(recipe("reward_model", train={"train_batch_size": 20, "steps": steps}, overwrite=True)) for steps in (1, 20)
    ]
    assert first["loss"] == pytest.approx(np.log(2)), "a new head of zeros: every margin is 0"
    assert last["accuracy"] == 1.0 and last["loss"] < 0.3
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert saved.config.num_labels == 1 and saved.score.weight.detach().abs().max() > 0

    path = str((tmp_path / "run").rename(tmp_path / "first") / "model")
    again = run_offline(recipe("reward_model", train={"train_batch_size": 20, "steps": 1, "learning_rate": 1e-9}, model={"path": path}))
    chosen, rejected = (scores(saved, tiny_policy, [row[key] for row in PAIRS]) for key in ("chosen", "rejected"))
    assert again["loss"] == pytest.approx(np.logaddexp(0, rejected - chosen).mean(), abs=1e-5), "goes on with its head"
    assert again["margin"] == pytest.approx((chosen - rejected).mean(), abs=1e-5)


@torch.no_grad()
def scores(model, tokenizer_path, answers):
    """Each sample alone, through the model's own forward."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    out = []
    for row, answer in zip(PAIRS, answers, strict=True):
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
        out.append(model(ids).logits.item())
    return np.array(out)


def test_held_out_metrics_at_the_end_of_each_epoch(recipe, tmp_path):
    held_out = write_rows(tmp_path / "eval.jsonl", PAIRS[:3])
    run_offline(recipe("reward_model", data={"eval_path": held_out}, train={"epochs": 2, "learning_rate": 1e-9}))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [("eval/loss" in row, "eval/accuracy" in row) for row in rows] == [(False, False)] * 2 + [(True, True)] + [
        (False, False)
    ] * 2 + [(True, True)]
    assert rows[-1]["eval/loss"] == pytest.approx(np.log(2), abs=1e-3)


def test_resumed_run_equals_one_that_never_stopped(recipe, tmp_path):
    settings = dict(
        data={"packing": False, "shuffle": True},
        train={"epochs": 3, "lr_schedule": "cosine", "warmup_ratio": 0.2},
        checkpoint={"every": 2, "keep": 2, "resume": True},
    )
    run_offline(recipe(**settings))
    whole, whole_rows = weights(tmp_path / "run/model"), read_metrics(tmp_path / "run/metrics.jsonl")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_6", "step_8"], "the newest two"
    (tmp_path / "run").rename(tmp_path / "whole")

    stopped = recipe(**settings)
    task, held_out, tokenizer = run_module.read_task(stopped)
    folder = run_module.RunFolder.open(stopped)
    rows = fit_here((stopped, task, held_out, tokenizer, 0))
    with MetricsLog(folder.metrics) as log:
        for _ in range(6):
            log.append(next(rows))
    rows.close()  # killed after update 6, before its checkpoint: update 5 and 6 are done again
    assert not folder.model.exists()
    assert folder.newest_checkpoint()[0] == 4

    run_offline(recipe(**settings))
    assert fixed(read_metrics(folder.metrics)) == fixed(whole_rows)
    assert closest(whole, weights(folder.model)) == 0.0


def test_a_finished_run_is_not_replaced_unasked(recipe, tmp_path):
    run_offline(recipe(train={"steps": 1}))
    before = weights(tmp_path / "run/model")
    with pytest.raises(UserError, match=r"output_dir: .*run already holds a run; set checkpoint.resume or overwrite"):
        run_offline(recipe(train={"steps": 1}))
    with pytest.raises(UserError, match=r"output_dir: .*run already holds a run"):
        check_offline(recipe(train={"steps": 1}))
    assert closest(before, weights(tmp_path / "run/model")) == 0.0
    run_offline(recipe(train={"steps": 2}, overwrite=True))
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 2


def test_resuming_another_run_is_refused(recipe):
    run_offline(recipe(checkpoint={"every": 1}))
    with pytest.raises(UserError, match=r"train.train_batch_size: 5, but the run to resume in .* has 8"):
        run_offline(recipe(train={"train_batch_size": 5}, checkpoint={"resume": True}))
    last = run_offline(recipe(checkpoint={"resume": True}))
    assert last["step"] == 1, "nothing is left to do"


def test_check_loads_no_model_and_writes_nothing(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    found = check_offline(recipe(data={"packing": False}))
    tokens = sum(len(row["prompt"] + row["completion"]) + 4 for row in SUMS)
    assert found == {"samples": 20, "items": 20, "eval_items": 0, "tokens": tokens, "updates": 3, "ranks": 1}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(rows=[]), r"data.jsonl: the dataset is empty"),
        (dict(rows=[SUMS[0], {"prompt": "a"}]), r"data.jsonl:2: completion: missing"),
        (dict(data={"eval_path": "absent.jsonl"}), r"data.eval_path: absent.jsonl: no such file"),
        (dict(model={"path": "./absent"}), r"model.path: ./absent: no such model folder"),
        (dict(devices={"rollout": 1}), r"devices: sft has one device group, train; not rollout"),
        (dict(devices={"train": 1.5}), r"devices.train: 1.5: must be a whole number, or less than 1"),
        (dict(devices={"train": 8}), r"train.micro_batch_size: 4 samples over 8 ranks"),
        (dict(data={"drop_last": True, "packing": False}, train={"train_batch_size": 64}), r"data.drop_last: 20 rows do not fill one"),
        (dict(rows=[{"text": "x" * 600}], data={"max_length": 999}), r"data.max_length: .*jsonl:1 has 602 tokens, the model takes 512"),
    ],
)  # fmt: skip
def test_bad_input_stops_before_a_model_is_loaded(recipe, tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    for act in (check_offline, run_offline):
        with pytest.raises(UserError, match=message):
            act(recipe(**settings))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(recipe, tmp_path, tiny_policy):
    config = json.loads((tiny_policy / "config.json").read_text()) | {"vocab_size": 10}
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model.path: .*small holds no weights"):
        check_offline(recipe(model={"path": str(tmp_path / "small"), "tokenizer": str(tiny_policy)}))
    (tmp_path / "small/model.safetensors").touch()
    with pytest.raises(UserError, match=r"model.tokenizer: .*data.jsonl:1 has token \d+, the model has 10 tokens"):
        check_offline(recipe(model={"path": str(tmp_path / "small"), "tokenizer": str(tiny_policy)}))


def test_a_failed_run_leaves_no_model(recipe, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("disk full")

    monkeypatch.setattr(fit_module.TrainEngine, "step", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        run_offline(recipe())
    assert not (tmp_path / "run/model").exists()


@pytest.mark.slow
def test_two_ranks_train_every_sample_once(recipe, tmp_path, ray_session):
    """Case 16: 5 samples in micro-batches of 2 leave rank 1 without one; under ZeRO-3 the weights are those of one rank."""
    settings = dict(rows=SUMS[:5], data={"packing": False})
    train = {"train_batch_size": 5, "micro_batch_size": 2, "epochs": 3}
    alone = run_offline(recipe(**settings, train=train))
    expected, expected_rows = weights(tmp_path / "run/model"), read_metrics(tmp_path / "run/metrics.jsonl")

    settings |= dict(devices={"train": 2}, overwrite=True)
    run_offline(recipe(**settings, train=train | {"zero_stage": 3, "epochs": 2}, checkpoint={"every": 1}))
    last = run_offline(recipe(**settings, train=train | {"zero_stage": 3}, checkpoint={"every": 1, "resume": True}))
    assert (last["step"], last["samples"], last["tokens"]) == (3, 5, alone["tokens"])
    for row, one in zip(read_metrics(tmp_path / "run/metrics.jsonl"), expected_rows, strict=True):
        assert (row["step"], row["loss"]) == (one["step"], pytest.approx(one["loss"], abs=1e-5))
    assert closest(expected, weights(tmp_path / "run/model")) < 1e-5


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_in_one_line(recipe, tmp_path, ray_session, tiny_policy):
    model = {"path": str(tiny_policy), "attention": "flash_attention_2"}
    with pytest.raises(UserError, match=r"model.path: .*policy: cannot be loaded as a model") as error:
        run_offline(recipe(devices={"train": 2}, model=model))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/model").exists()
