"""Held-out prompts: whose samples count, and what the line of a version says."""

import pytest

from conveyor.config import parse_recipe
from conveyor.pipeline.actions import CloseEvaluation, Evaluate, EvaluationSampled, ScoreEvaluation
from conveyor.pipeline.evaluation import Evaluation
from conveyor.pipeline.held_out import HeldOut
from conveyor.pipeline.run_plan import EvaluationPlan, RunPlan, ScorePart
from conveyor.types import Prompt, SampleId
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone, Span

SPAN = Span(0, 1)


def held_out(prompts: int = 3, samples: int = 2, **evaluate: object) -> HeldOut:
    recipe = parse_recipe(
        {
            "method": "grpo", "output_dir": "o", "model": {"path": "m"}, "data": {"path": "d"},
            "rewards": [{"name": "right", "model": "b"}, {"name": "short", "function": "a.py:c", "weight": 0.5, "clip": 10}],
            "algorithm": {"missing_eos_penalty": 5, "overlong_buffer": 200},
            "evaluate": {"path": "e", "n_samples_per_prompt": samples, **evaluate},
        }
    )  # fmt: skip
    plan = RunPlan((1,), 1, 1, 1, evaluation=EvaluationPlan(prompts, samples))
    return HeldOut(recipe, plan, [Prompt(-1 - i, i, (1,), f"p{i}") for i in range(prompts)])


def judge(made: HeldOut, prompt: int, *rewards: float | None, version: int = 4) -> None:
    """What the function says, of the last sample first."""
    for sample, reward in reversed(list(enumerate(rewards))):
        made.judged(Judged(SampleId(-1 - prompt, sample), version, {"short": reward}, 0, 0, SPAN))


def finish(made: HeldOut, prompt: int, version: int = 4, samples: int = 2) -> None:
    for sample in reversed(range(samples)):
        done = SampleDone(SampleId(-1 - prompt, sample), 10 * (prompt + 1), sample == 1, version, version, SPAN)
        assert made.sampled(0, done, f"ref {prompt}.{sample}") == EvaluationSampled(0, prompt, version, False)


def test_a_prompt_is_asked_for_with_its_samples_and_a_greedy_answer_beside() -> None:
    prompt = Prompt(-2, 1, (1,), "p1")
    assert held_out().submission(Evaluate(0, 1, 4)) == (prompt, 2, 4, None, False)
    assert held_out(greedy=True, temperature=0.5).submission(Evaluate(0, 1, 4)) == (prompt, 2, 4, 0.5, True)


def test_samples_are_scored_in_prompt_order_and_summed_with_their_weights() -> None:
    made = held_out(2)
    for prompt in (1, 0):
        finish(made, prompt)
    action = ScoreEvaluation(0, 0, 4, (0, 1))
    assert made.rollouts(action) == ["ref 0.0", "ref 0.1", "ref 1.0", "ref 1.1"]
    made.scored(action, {"right": (1.0, 0.0, 1.0, None)})
    judge(made, 1, 2.0, None)
    judge(made, 0, None, 1.0)
    assert made.rollout(4, SampleId(-2, 1)) == "ref 1.1"
    line = made.close(4)
    assert line == {
        "step": 4, "version": 4, "eval/reward/mean": pytest.approx((1 + 0.5 + 2) / 3), "eval/reward/right": pytest.approx(2 / 3),
        "eval/reward/short": 1.5, "eval/response_length/mean": 15, "eval/truncated_fraction": 0.5, "eval/prompts": 2, "eval/samples": 4,
        "eval/coverage": 1.0, "eval/pass@1": 0.5,
    }  # fmt: skip


def test_only_prompts_before_the_first_unfinished_one_count() -> None:
    """Prompt 2 has finished because it is short; counting it and not prompt 1 would favour short answers."""
    made = held_out(3)
    finish(made, 0)
    finish(made, 2)
    assert made.aborted(0, EvaluationAborted(SampleId(-2, 0), 4, SPAN)) == EvaluationSampled(0, 1, 4, True)
    made.scored(ScoreEvaluation(0, 0, 4, (0, 2)), {"right": (1.0, 1.0, 0.0, 0.0)})
    judge(made, 0, 0.0, 0.0)
    judge(made, 2, 0.0, 0.0)
    line = made.close(4)
    assert (line["eval/reward/right"], line["eval/prompts"], line["eval/coverage"]) == (1.0, 1, pytest.approx(1 / 3))


def test_a_version_without_any_finished_prompt_has_a_line_that_says_so() -> None:
    line = held_out(3).close(2)
    assert line["eval/reward/mean"] is None and line["eval/coverage"] == 0 and line["eval/truncated_fraction"] is None


def test_pass_at_k_and_the_greedy_answer_are_told_apart() -> None:
    """Case: 3 samples and a greedy one. Right are 2 of prompt 0 (and its greedy answer) and none of prompt 1."""
    made = held_out(2, samples=3, greedy=True, pass_at=[1, 2, 3], success_threshold=1.5)
    for prompt in (0, 1):
        finish(made, prompt, samples=4)
    action = ScoreEvaluation(0, 0, 4, (0, 1))
    made.scored(action, {"right": (1.0, 0.0, 2.0, 1.5, None, 1.0, 1.0, 1.0)})
    judge(made, 0, 1.0, 1.0, 0.0, 0.0)
    assert made.close(4)["eval/coverage"] == 0.5, "prompt 1 is not judged"
    made = held_out(2, samples=3, greedy=True, pass_at=[1, 2, 3], success_threshold=1.5)
    for prompt in (0, 1):
        finish(made, prompt, samples=4)
    made.scored(action, {"right": (1.0, 0.0, 2.0, 1.5, None, 1.0, 1.0, 1.0)})
    judge(made, 0, 1.0, 1.0, 0.0, 0.0)
    judge(made, 1, None, 0.0, 0.0, 0.0)
    line = made.close(4)
    assert line["eval/pass@1"] == pytest.approx((2 / 3 + 0) / 2) and line["eval/pass@2"] == line["eval/pass@3"] == 0.5
    assert line["eval/reward/mean"] == pytest.approx((1.5 + 0.5 + 2.0 + 1.0 + 1.0) / 5), "no penalties, and the unjudged left out"
    assert line["eval/samples"] == 6 and line["eval/reward/right"] == pytest.approx((1 + 0 + 2 + 1 + 1) / 5)
    assert line["eval/greedy/pass@1"] == 0.5 and line["eval/greedy/reward/mean"] == pytest.approx((1.5 + 1.0) / 2)
    assert line["eval/greedy/response_length/mean"] == 15


def test_one_reward_may_say_what_is_right() -> None:
    made = held_out(1, success_reward="short", success_threshold=2.0)
    finish(made, 0)
    made.scored(ScoreEvaluation(0, 0, 4, (0,)), {"right": (5.0, 5.0)})
    judge(made, 0, 2.0, 1.0)
    assert made.close(4)["eval/pass@1"] == 0.5


def test_what_is_said_of_a_sample_goes_to_its_own_version() -> None:
    made = held_out(1)
    for version in (4, 6):
        finish(made, 0, version)
        made.scored(ScoreEvaluation(0, 0, version, (0,)), {"right": (1.0, 1.0)})
    judge(made, 0, 3.0, 3.0, version=6)
    judge(made, 0, 20.0, -20.0, version=4)
    assert made.close(6)["eval/reward/short"] == 3.0
    line = made.close(4)
    assert line["eval/reward/short"] == 0.0 and line["eval/reward/mean"] == pytest.approx((1 + 5 + 1 - 5) / 2), "cut to ± 10"


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
