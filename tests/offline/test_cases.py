"""What holds of every method that learns from a fixed dataset: one BOS, over-long rows, the remainder, bad input, adapters or not."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from conveyor.cli import main
from conveyor.config import UserError
from conveyor.offline import fit as fit_module
from conveyor.offline import reference as reference_module
from conveyor.offline.run import TASKS, check_offline, read_task, run_offline
from conveyor.report.progress import read_metrics
from tests.offline.conftest import Prepare, Updates

ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(10)],
    "conditional_sft": [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}", "reward": i % 3} for i in range(10)],
    "reward_model": [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{2 * i + 1} maybe"} for i in range(10)],
    "process_reward_model": [{"prompt": f"{i}", "completions": [f"{i}+1", "= ?"], "labels": [True, i % 2 == 0]} for i in range(10)],
    "kto": [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}", "label": i % 2 == 0} for i in range(10)],
}
ROWS["dpo"], ROWS["bco"] = ROWS["reward_model"], ROWS["kto"]
LONG: dict[str, dict[str, Any]] = {
    method: {key: "x" * 80 if key == "prompt" else value for key, value in rows[0].items()} for method, rows in ROWS.items()
}
every_method = pytest.mark.parametrize("method", TASKS)


def test_these_are_all_methods() -> None:
    assert set(ROWS) == set(TASKS)


@every_method
@pytest.mark.parametrize("messages", [False, True])
def test_case_8_every_sample_begins_with_one_bos(prepare: Prepare, method: str, messages: bool) -> None:
    """The template starts with BOS and so does the tokenizer; KTO's crossed pairs have one too."""
    rows = [row | ({"prompt": [{"role": "user", "content": row["prompt"]}]} if messages else {}) for row in ROWS[method]]
    task, *_ = read_task(prepare(method, rows))
    samples = [*task.samples, *task.surveyed(range(len(task.items)))]
    assert len(samples) >= 10
    assert all(sample.ids[0] == 1 and (sample.ids == 1).sum() == 1 for sample in samples)


@every_method
def test_case_13_rows_that_are_too_long_are_dropped_and_counted(
    prepare: Prepare, updates: Updates, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    rows = [LONG[method], *ROWS[method][:4], LONG[method]]
    with caplog.at_level(logging.WARNING):
        (update,), task = updates(prepare(method, rows, data={"packing": False}))
    assert update.row["samples"] == 4 == len(task.items)
    assert np.isfinite(update.loss)
    assert "dropped 2 of 6 samples, longer than data.max_length (64 tokens)" in caplog.text
    with pytest.raises(UserError, match=r"rows.jsonl:1: \d+ tokens, data.max_length is 64"):
        check_offline(prepare(method, rows, data={"on_long": "error"}))
    with pytest.raises(UserError, match=r"rows.jsonl: every sample is longer than data.max_length"):
        check_offline(prepare(method, [LONG[method]] * 2, condition={"mean": 0, "std": 1}) if method == "conditional_sft"
                      else prepare(method, [LONG[method]] * 2))  # fmt: skip


@every_method
def test_case_23_ten_rows_in_updates_of_four(prepare: Prepare, tmp_path: Path, method: str) -> None:
    """The last update of an epoch is short, or dropped where the recipe says so; no row of one epoch goes into the next."""
    settings: dict[str, Any] = {"train": {"train_batch_size": 4, "micro_batch_size": 3, "epochs": 2}}
    run_offline(prepare(method, ROWS[method], data={"packing": False, "shuffle": True}, **settings))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(row["epoch"], row["samples"]) for row in rows] == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)]
    assert sum(row["tokens"] for row in rows[:3]) == sum(row["tokens"] for row in rows[3:]), "every row once an epoch"
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in rows)
    assert check_offline(prepare(method, ROWS[method], data={"packing": False, "drop_last": True}, **settings))["updates"] == 4


BAD_FILES = {
    "no rows": ("", r"rows.jsonl: the dataset is empty"),
    "no JSON": ("{\n", r"rows.jsonl:1: "),
    "a list": ("[1]\n", r"rows.jsonl:1: "),
    "another form": (json.dumps({"question": "a"}) + "\n", r"rows.jsonl:1: "),
}


@every_method
@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_one_line_and_status_2_before_a_model_is_loaded(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, kind: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(fit_module, "TrainEngine", load)
    monkeypatch.setattr(reference_module, "load_language_model", load)
    for task in TASKS.values():
        monkeypatch.setattr(task, "load_model", load)
    text, message = BAD_FILES[kind]
    recipe = prepare(method, ROWS[method])
    (tmp_path / "rows.jsonl").write_text(text)
    for act in (check_offline, run_offline):
        with pytest.raises(UserError, match=message) as caught:
            act(recipe)
        assert "\n" not in str(caught.value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
