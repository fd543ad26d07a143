"""Held-out prompts: whose samples count, and what the line of a version says."""

import pytest

from conveyor.config import parse_recipe
from conveyor.pipeline.actions import CloseEvaluation, Evaluate, EvaluationSampled, ScoreEvaluation
from conveyor.pipeline.evaluation import Evaluation
from conveyor.pipeline.held_out import HeldOut
from conveyor.pipeline.run_plan import EvaluationPlan, RunPlan, ScorePart
from conveyor.types import Prompt, SampleId
from conveyor.workers.reports import EvaluationAborted, SampleDone, Span

SPAN = Span(0, 1)


def held_out(prompts: int = 3) -> HeldOut:
    recipe = parse_recipe(
        {
            "method": "grpo", "output_dir": "o", "model": {"path": "m"}, "data": {"path": "d"},
            "rewards": [{"name": "right", "function": "a.py:b"}, {"name": "short", "function": "a.py:c", "weight": 0.5}],
            "evaluate": {"path": "e", "n_samples_per_prompt": 2, "greedy": True},
        }
    )  # fmt: skip
    plan = RunPlan((1,), 1, 1, 1, evaluation=EvaluationPlan(prompts, 2))
    return HeldOut(recipe, plan, [Prompt(-1 - i, i, (1,), f"p{i}") for i in range(prompts)])


def finish(made: HeldOut, prompt: int, version: int = 4) -> None:
    for sample in (1, 0):
        done = SampleDone(SampleId(-1 - prompt, sample), 10 * (prompt + 1), sample == 1, version, version, SPAN)
        assert made.sampled(0, done, f"ref {prompt}.{sample}") == EvaluationSampled(0, prompt, version, False)


def test_greedy_evaluation_asks_for_temperature_0() -> None:
    assert held_out().submission(Evaluate(0, 1, 4)) == (Prompt(-2, 1, (1,), "p1"), 2, 4, 0.0)


def test_samples_are_scored_in_prompt_order_and_summed_with_their_weights() -> None:
    made = held_out(2)
    for prompt in (1, 0):
        finish(made, prompt)
    action = ScoreEvaluation(0, 0, 4, (0, 1))
    assert made.rollouts(action) == ["ref 0.0", "ref 0.1", "ref 1.0", "ref 1.1"]
    made.scored(action, {"right": (1.0, 0.0, 1.0, None)})
    made.scored(action, {"short": (None, 1.0, 2.0, None)})
    line = made.close(4)
    assert line == {
        "step": 4, "version": 4, "eval/reward/mean": pytest.approx((1 + 0.5 + 2) / 3), "eval/reward/right": pytest.approx(2 / 3),
        "eval/reward/short": 1.5, "eval/response_length/mean": 15, "eval/truncated_fraction": 0.5, "eval/prompts": 2, "eval/samples": 4,
        "eval/coverage": 1.0,
    }  # fmt: skip


def test_only_prompts_before_the_first_unfinished_one_count() -> None:
    """Prompt 2 has finished because it is short; counting it and not prompt 1 would favour short answers."""
    made = held_out(3)
    finish(made, 0)
    finish(made, 2)
    assert made.aborted(0, EvaluationAborted(SampleId(-2, 0), 4, SPAN)) == EvaluationSampled(0, 1, 4, True)
    made.scored(ScoreEvaluation(0, 0, 4, (0, 2)), {"right": (1.0, 1.0, 0.0, 0.0), "short": (0.0, 0.0, 0.0, 0.0)})
    line = made.close(4)
    assert (line["eval/reward/right"], line["eval/prompts"], line["eval/coverage"]) == (1.0, 1, pytest.approx(1 / 3))


def test_a_version_without_any_finished_prompt_has_a_line_that_says_so() -> None:
    line = held_out(3).close(2)
    assert line["eval/reward/mean"] is None and line["eval/coverage"] == 0 and line["eval/truncated_fraction"] is None


def test_a_micro_batch_of_an_evaluation_is_of_one_version() -> None:
    """Version 0 has a prompt left to score when version 1's come in."""
    plan = RunPlan((1, 1), 1, 1, 4, parts=(ScorePart("score", ("right",), False, ("right",)),), evaluation=EvaluationPlan(2, 1))
    evaluation = Evaluation(plan)
    for version in (0, 1):
        evaluation.open(version)
        for prompt in (0, 1):
            evaluation.start(Evaluate(0, prompt, version))
            evaluation.sampled(EvaluationSampled(0, prompt, version, False))
    for version in (0, 1):
        action = evaluation.to_score(0, 0)
        assert action == ScoreEvaluation(0, 0, version, (0, 1))
        evaluation.start_score(action)
        evaluation.scored(action)
    assert evaluation.to_score(0, 0) is None
    assert evaluation.to_close({1}, 1) == CloseEvaluation(0)
