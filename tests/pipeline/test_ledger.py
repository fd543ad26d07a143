"""Statistics that need more than one micro-batch are made of all of it, whatever the cut."""

import math

import numpy as np
import pytest

from conveyor.algorithms.metrics import Moments
from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.pipeline.ledger import Ledger
from conveyor.types import SampleId
from conveyor.workers.reports import Denominators, MicroBatchKey, PrepareReport, SampleReport, Span


def recipe(method: str = "grpo", **algorithm: object) -> OnlineRecipe:
    made = parse_recipe({
        "method": method, "output_dir": "x", "model": {"path": "m"}, "data": {"path": "d"}, "algorithm": algorithm,
        "rewards": [{"name": "r", "model": "r"}], "rollout": {"n_samples_per_prompt": 2 if method == "grpo" else 1},
        "train": {"rollout_batch_size": 4}, "pipeline": {"micro_batch_size": 1},
    })  # fmt: skip
    assert isinstance(made, OnlineRecipe)
    return made


def report(group: int, sample: int, outcome: float | None, tokens: int) -> SampleReport:
    return SampleReport(SampleId(group, sample), {"r": outcome}, outcome, outcome, None, tokens, tokens, False, 0, 0)


def fill(ledger: Ledger, cut: list[list[SampleReport]], moments: Moments | None = None) -> list[MicroBatchKey]:
    keys = [MicroBatchKey(0, 0, number) for number in range(len(cut))]
    for key, samples in zip(keys, cut, strict=True):
        ledger.add_reports(0, [PrepareReport(key, tuple(samples), moments, Span(0, 0))])
    return keys


SAMPLES = [report(0, 0, 1.0, 3), report(0, 1, 3.0, 1), report(1, 0, 0.0, 2), report(1, 1, 5.0, 4)]


@pytest.mark.parametrize("cut", [[SAMPLES], [SAMPLES[:1], SAMPLES[1:3], SAMPLES[3:]], [[s] for s in SAMPLES]])
def test_group_advantages_do_not_depend_on_the_cut(cut: list[list[SampleReport]]) -> None:
    ledger = Ledger(recipe(advantage_estimator="dr_grpo"))
    keys = fill(ledger, cut)
    context = ledger.context(0, keys[0], [SampleId(0, 0), SampleId(1, 0)])
    assert context.outcome_advantages == {SampleId(0, 0): -1, SampleId(0, 1): 1, SampleId(1, 0): -2.5, SampleId(1, 1): 2.5}
    assert context.whiten is None
    assert ledger.denominators(0, 0, 0) == Denominators(tokens=10, sequences=4)


def test_whitening_counts_tokens_of_the_whole_update() -> None:
    ledger = Ledger(recipe(advantage_estimator="dr_grpo", normalize="update"))
    keys = fill(ledger, [[s] for s in SAMPLES])
    mean, std = ledger.context(0, keys[0], [SampleId(0, 0)]).whiten or (math.nan, math.nan)
    tokens = np.array([-1.0] * 3 + [1.0] + [-2.5] * 2 + [2.5] * 4)
    assert mean == pytest.approx(tokens.mean()) and std == pytest.approx(tokens.std(ddof=1))


def test_token_wise_moments_are_added_up_over_micro_batches_and_ranks() -> None:
    ledger = Ledger(recipe("ppo", normalize="update"))
    keys = fill(ledger, [[SAMPLES[0]], [SAMPLES[2]]], Moments(2, 3.0, 5.0))
    assert ledger.context(0, keys[0], [SampleId(0, 0)]).whiten == pytest.approx((1.5, math.sqrt((10 - 9) / 3)))


def test_a_sample_without_reward_is_left_out_of_baseline_and_denominator() -> None:
    samples = [report(0, 0, 1.0, 3), report(0, 1, None, 0), report(1, 0, 1.0, 2), report(1, 1, 0.0, 2)]
    ledger = Ledger(recipe(advantage_estimator="rloo"))
    keys = fill(ledger, [samples])
    advantages = ledger.context(0, keys[0], [s.id for s in samples]).outcome_advantages
    assert advantages == {SampleId(0, 0): 0, SampleId(0, 1): 0, SampleId(1, 0): 1, SampleId(1, 1): -1}
    assert ledger.denominators(0, 0, 0) == Denominators(tokens=7, sequences=3)


def test_a_finished_step_leaves_nothing_behind() -> None:
    ledger = Ledger(recipe())
    fill(ledger, [SAMPLES])
    key = MicroBatchKey(0, 0, 0)
    ledger.add_rollout(SampleId(0, 0), "rollout")
    ledger.add_score(key, 1, "second")
    ledger.add_score(key, 0, "first")
    assert ledger.rollouts([SampleId(0, 0)]) == ["rollout"] and ledger.scores(key) == ["first", "second"]
    ledger.release(key, [SampleId(0, 0)])
    assert [sample.id for sample in ledger.finish_step(0, 0)] == [SampleId(g, k) for g in (0, 1) for k in (0, 1)]
    assert not ledger._rollouts and not ledger._scores and not ledger._updates
