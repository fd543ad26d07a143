"""A step's line: what is averaged over what, and what a step without a finite gradient means."""

import logging
import math
from types import SimpleNamespace

import pytest

from conveyor.config import RunError, parse_recipe
from conveyor.pipeline.recorder import LOST_STEPS, Recorder
from conveyor.pipeline.step_metrics import drop_metrics, optim_metrics, sample_metrics, sync_metrics
from conveyor.types import SampleId
from conveyor.workers.reports import Judged, OptimReport, SampleReport, Span, StepReport

SPAN = Span(0.0, 1.0)


def recipe(method: str = "dapo"):
    return parse_recipe({
        "method": method, "output_dir": "x", "model": {"path": "m"}, "data": {"path": "d"}, "train": {"rollout_batch_size": 2},
        "rewards": [{"name": "right", "function": "f.py:f"}, {"name": "style", "function": "f.py:g", "weight": 0.5}],
        "rollout": {"n_samples_per_prompt": 2}, "pipeline": {"micro_batch_size": 1}, "algorithm": {"kl_coef": 0.0},
    })  # fmt: skip


def report(group: int, sample: int, right: float | None, tokens: int = 4, baseline: bool = False) -> SampleReport:
    rewards = {"right": right, "style": 1.0}
    score = None if right is None else right + 0.5
    return SampleReport(SampleId(group, sample), rewards, score, score, None, tokens, tokens, False, 3, 3 * tokens, baseline=baseline)


def test_greedy_baselines_are_tokens_and_a_mean_of_their_own() -> None:
    row = sample_metrics(recipe("remax"), 3, [report(0, 0, 1.0), report(0, 1, None), report(0, 2, 0.0, tokens=2, baseline=True)])
    assert row["reward/mean"] == 1.5 and row["reward/right"] == 1.0 and row["reward/style"] == 1.0 and row["reward/greedy"] == 0.5
    assert (row["samples"], row["samples/unscored"], row["tokens"], row["response_length/mean"]) == (2, 1, 10, 4.0)


def test_groups_left_out_count_in_the_mean_of_what_was_sampled() -> None:
    """Two samples kept with totals 1.5 and 0.5, two dropped with 1.5 each."""
    dropped = [[Judged(SampleId(1, k), 3, {"right": 1.0, "style": 1.0}, 0, 0, SPAN) for k in range(2)]]
    row = drop_metrics(recipe(), dropped, [report(0, 0, 1.0), report(0, 1, 0.0)])
    assert row == {"groups/dropped": 1, "reward/sampled": (1.5 + 0.5 + 1.5 + 1.5) / 4}
    assert drop_metrics(recipe("grpo"), [], [report(0, 0, 1.0)]) == {}


def test_a_skipped_update_is_counted_and_in_no_mean() -> None:
    steps = [StepReport(2.0, 1e-3), StepReport(math.nan, 1e-3, skipped=True)]
    row = optim_metrics([OptimReport({"actor": step}, SPAN) for step in steps])
    assert row == {"grad_norm": 2.0, "lr": 1e-3, "updates_skipped": 1}


def test_a_run_in_which_no_gradient_is_finite_ends(caplog: pytest.LogCaptureFixture) -> None:
    recorder = SimpleNamespace(_lost_steps=0)
    lost = [OptimReport({"actor": StepReport(math.inf, 1e-3, skipped=True)}, SPAN)]
    learnt = [*lost, OptimReport({"actor": StepReport(1.0, 1e-3)}, SPAN)]
    with caplog.at_level(logging.WARNING):
        for step in range(LOST_STEPS - 1):
            Recorder._look_at_gradients(recorder, step, lost)
        Recorder._look_at_gradients(recorder, LOST_STEPS - 1, learnt)
        for step in range(LOST_STEPS - 1):
            Recorder._look_at_gradients(recorder, step, lost)
        with pytest.raises(RunError, match=f"no update of the last {LOST_STEPS} steps"):
            Recorder._look_at_gradients(recorder, 99, lost)
    assert "step 1: a gradient of the actor is not finite" in caplog.text


def test_nothing_to_learn_is_not_an_error() -> None:
    recorder = SimpleNamespace(_lost_steps=0)
    for step in range(2 * LOST_STEPS):
        Recorder._look_at_gradients(recorder, step, [OptimReport({"actor": StepReport(0.0, 1e-3, skipped=True)}, SPAN)])
    assert recorder._lost_steps == 0


def test_what_a_sync_moved_and_how_long_the_slowest_took() -> None:
    row = sync_metrics([(100, 0.5), (20, 0.25)], [0.1, 0.4, 0.2])
    assert row == {"sync/bytes": 120, "sync/publish_seconds": 0.75, "sync/install_seconds": 0.4}
    assert sync_metrics([], []) == {"sync/bytes": 0, "sync/publish_seconds": 0, "sync/install_seconds": 0.0}
