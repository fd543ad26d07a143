"""What a run says while it goes on, and metrics.jsonl."""

import io
import json

import pytest
from rich.console import Console

from conveyor.report.progress import MetricsLog, RunProgress, read_metrics, summary
from conveyor.report.tables import cell, table

ROW = {
    "step": 1, "reward/mean": 0.4123, "kl": 0.0131, "tokens_per_second": 2104.4, "idle/rollout": 0.118, "idle/train": 0.4,
    "time/step": 1.5,
}  # fmt: skip


def test_summary_of_a_step():
    assert summary(ROW) == "reward 0.412 · kl 0.0131 · 2,104 tokens/s · idle rollout 12% train 40%"
    assert summary({"step": 1, "loss": 2.5, "reward/mean": None}) == "loss 2.5"
    assert summary({}) == ""


def test_no_terminal_gets_a_line_at_the_start_and_one_at_the_end():
    out = io.StringIO()
    with RunProgress("ppo", total=3, done=1, console=Console(file=out, force_terminal=False, width=40)) as progress:
        progress.ready("rollout 0")
        for _ in range(2):
            progress.step(ROW)
    lines = out.getvalue().splitlines()
    assert lines[0] == "ppo: 2 steps"
    assert lines[1].startswith("ppo: 3 of 3 steps in 0 s · reward 0.412")
    assert len(lines) == 2


def test_a_terminal_shows_the_step_and_its_numbers():
    out = io.StringIO()
    with RunProgress("ppo", total=2, console=Console(file=out, force_terminal=True, width=160)) as progress:
        progress.ready("rollout 0")
        progress.step(ROW)
    assert "1/2" in out.getvalue() and "reward 0.412" in out.getvalue() and "idle rollout 12%" in out.getvalue()


def test_a_run_that_fails_says_how_far_it_came():
    out = io.StringIO()
    with pytest.raises(RuntimeError), RunProgress("grpo", total=5, console=Console(file=out, force_terminal=False)) as progress:
        progress.step(ROW)
        raise RuntimeError("engine died")
    assert out.getvalue().splitlines()[-1] == "grpo: 1 of 5 steps in 0 s, ended by an error"


def test_metrics_are_appended_a_line_a_step_and_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(ROW)
        assert read_metrics(path) == [ROW]  # at once, not at the end
    with MetricsLog(path) as log:
        log.append({"step": 2, "grad_norm": float("nan"), "ratio/max": float("inf"), "reward/mean": None})
    assert read_metrics(path)[1] == {"step": 2, "grad_norm": None, "ratio/max": None, "reward/mean": None}
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("line", ["{", "[1]"])
def test_a_metrics_line_that_cannot_be_read_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_cells_of_a_table():
    assert [cell(value) for value in (None, "a", 12345, 0.48123, 1.2e-6, 54321.7, 3.0)] == [
        "–",
        "a",
        "12,345",
        "0.4812",
        "1.2e-06",
        "54,322",
        "3",
    ]
    out = io.StringIO()
    Console(file=out, width=60).print(table("Accuracy", ["", "SFT", "PPO"], [["held-out", 0.5, 0.75], ["train", None, 1]]))
    words = [line.split() for line in out.getvalue().splitlines()]
    assert ["held-out", "0.5", "0.75"] in words and ["train", "–", "1"] in words
