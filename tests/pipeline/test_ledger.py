"""Statistics that need more than one micro-batch are made of all of it, whatever the cut."""

import math
from dataclasses import replace

import numpy as np
import pytest

from conveyor.algorithms.metrics import Moments
from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.pipeline.ledger import Ledger
from conveyor.types import PartialScores, SampleId
from conveyor.workers.reports import Denominators, Judged, MicroBatchKey, PrepareReport, SampleReport, Span, TrainReport


def recipe(method: str = "grpo", rewards: list[dict] | None = None, n: int | None = None, **algorithm: object) -> OnlineRecipe:
    made = parse_recipe({
        "method": method, "output_dir": "x", "model": {"path": "m"}, "data": {"path": "d"}, "algorithm": algorithm,
        "rewards": rewards or [{"name": "r", "model": "r"}],
        "rollout": {"n_samples_per_prompt": n or (1 if method in ("ppo", "remax", "reinforce_pp") else 2)},
        "train": {"rollout_batch_size": 4}, "pipeline": {"micro_batch_size": 2 if method == "online_dpo" else 1},
    })  # fmt: skip
    assert isinstance(made, OnlineRecipe)
    return made


def report(group: int, sample: int, outcome: float | None, tokens: int) -> SampleReport:
    return SampleReport(SampleId(group, sample), {"r": outcome}, outcome, outcome, None, tokens, tokens, False, 0, 0)


def fill(ledger: Ledger, cut: list[list[SampleReport]]) -> list[MicroBatchKey]:
    keys = [MicroBatchKey(0, 0, number) for number in range(len(cut))]
    for key, samples in zip(keys, cut, strict=True):
        ledger.add_reports(0, [PrepareReport(key, tuple(samples), Span(0, 0))])
    return keys


SAMPLES = [report(0, 0, 1.0, 3), report(0, 1, 3.0, 1), report(1, 0, 0.0, 2), report(1, 1, 5.0, 4)]


@pytest.mark.parametrize("cut", [[SAMPLES], [SAMPLES[:1], SAMPLES[1:3], SAMPLES[3:]], [[s] for s in SAMPLES]])
def test_group_advantages_do_not_depend_on_the_cut(cut: list[list[SampleReport]]) -> None:
    ledger = Ledger(recipe(advantage_estimator="dr_grpo"))
    keys = fill(ledger, cut)
    context = ledger.context(0, keys[0], [SampleId(0, 0), SampleId(1, 0)])
    assert context.outcome_advantages == {SampleId(0, 0): -1, SampleId(0, 1): 1, SampleId(1, 0): -2.5, SampleId(1, 1): 2.5}
    assert context.whiten is None
    assert ledger.denominators(0, 0, 0) == Denominators(tokens=10, sequences=4, samples=4, pairs=0)


def test_whitening_counts_tokens_of_the_whole_update() -> None:
    ledger = Ledger(recipe(advantage_estimator="dr_grpo", normalize="update"))
    keys = fill(ledger, [[s] for s in SAMPLES])
    mean, std = ledger.context(0, keys[0], [SampleId(0, 0)]).whiten or (math.nan, math.nan)
    tokens = np.array([-1.0] * 3 + [1.0] + [-2.5] * 2 + [2.5] * 4)
    assert mean == pytest.approx(tokens.mean()) and std == pytest.approx(tokens.std(ddof=1))


def test_token_wise_moments_are_added_up_over_micro_batches_and_ranks() -> None:
    ledger = Ledger(recipe("ppo", normalize="update"))
    keys = fill(ledger, [[replace(SAMPLES[0], moments=Moments(2, 3.0, 5.0))], [replace(SAMPLES[2], moments=Moments(2, 3.0, 5.0))]])
    assert ledger.context(0, keys[0], [SampleId(0, 0)]).whiten == pytest.approx((1.5, math.sqrt((10 - 9) / 3)))


def test_whitening_after_a_baseline_is_of_what_is_trained() -> None:
    """Returns of each token, less the mean score of the group; a greedy or unscored sample has no moments."""
    returns = {SampleId(0, 0): [1.0, 1.5], SampleId(0, 1): [3.0], SampleId(1, 0): [0.5, 0.25, 0.0], SampleId(1, 1): [5.0]}
    ledger = Ledger(recipe("reinforce_pp_baseline", kl_coef=0))
    samples = [
        replace(sample, moments=Moments(len(found), sum(found), sum(one**2 for one in found)))
        for sample in SAMPLES
        for found in [returns[sample.id]]
    ]
    keys = fill(ledger, [[sample] for sample in samples])
    context = ledger.context(0, keys[0], [SampleId(0, 0)])
    assert context.baselines == {SampleId(0, 0): 2.0, SampleId(0, 1): 2.0}
    trained = np.concatenate([np.array(found) - {0: 2.0, 1: 2.5}[sample.group] for sample, found in returns.items()])
    assert context.whiten == pytest.approx((trained.mean(), trained.std(ddof=1)))


def test_the_greedy_sample_is_the_baseline_and_in_no_denominator() -> None:
    greedy = replace(report(0, 1, 0.75, 0), response_length=4, baseline=True)
    ledger = Ledger(recipe("remax"))
    keys = fill(ledger, [[report(0, 0, 1.0, 3)], [greedy]])
    assert ledger.context(0, keys[0], [SampleId(0, 0)]).baselines == {SampleId(0, 0): 0.75, SampleId(0, 1): 0.75}
    assert ledger.denominators(0, 0, 0) == Denominators(tokens=3, sequences=1, samples=1, pairs=0)


def test_pairs_are_counted_by_group_without_ties_and_masked_samples() -> None:
    masked = replace(report(2, 0, 9.0, 0), response_length=5, truncated=True)
    groups = [report(0, 0, 1.0, 3), report(0, 1, 3.0, 1), report(1, 0, 2.0, 2), report(1, 1, 2.0, 4), masked, report(2, 1, 0.0, 1)]
    ledger = Ledger(recipe("online_dpo"))
    keys = fill(ledger, [groups])
    signs = ledger.context(0, keys[0], [sample.id for sample in groups]).outcome_advantages
    assert list(signs.values()) == [-1, 1, 0, 0, 0, 0]
    assert ledger.denominators(0, 0, 0).pairs == 1


def test_rewards_normalised_by_batch_are_of_the_whole_update() -> None:
    rewards = [{"name": "r", "model": "r", "normalize": "batch", "clip": 1.0}, {"name": "s", "model": "s", "weight": 0.5}]
    ledger = Ledger(recipe(rewards=rewards, kl_in="reward", advantage_estimator="dr_grpo"))
    raw = {SampleId(0, 0): (1.0, 1.0), SampleId(0, 1): (None, 2.0), SampleId(1, 0): (4.0, None), SampleId(1, 1): (None, None)}
    samples = [
        SampleReport(sample, {"r": r, "s": s}, None if r is None and s is None else 0.0, None, None, 3, 3, False, 0, 0, kl_penalty=0.125)
        for sample, (r, s) in raw.items()
    ]
    keys = fill(ledger, [[sample] for sample in samples])
    context = ledger.context(0, keys[0], [SampleId(0, 0), SampleId(0, 1)])
    mean, std = 2.5, np.std([1.0, 4.0], ddof=1)
    scores = {SampleId(0, 0): (1.0 - mean) / std + 0.5, SampleId(0, 1): 1.0}
    assert context.scores == pytest.approx(scores)
    half = (scores[SampleId(0, 0)] - scores[SampleId(0, 1)]) / 2
    assert context.outcome_advantages == pytest.approx({SampleId(0, 0): half, SampleId(0, 1): -half})
    assert ledger.context(0, keys[2], [SampleId(1, 0), SampleId(1, 1)]).scores == pytest.approx(
        {SampleId(1, 0): 1.5 / std, SampleId(1, 1): None}
    )
    finished = {sample.id: sample.score for sample in ledger.finish_step(0, 0)}
    assert finished[SampleId(0, 1)] == 1.0 and finished[SampleId(1, 1)] is None


def test_moments_of_a_stream_are_whitened_when_the_update_is_whole() -> None:
    ledger = Ledger(recipe("ppo", normalize="streaming_exact"))
    keys = fill(ledger, [[SAMPLES[0]], [SAMPLES[2]]])
    for key in keys:
        ledger.add_train_reports(
            0, key, [TrainReport({}, Span(0, 0), Moments(2, 3.0, 5.0)), TrainReport({}, Span(0, 0), Moments(0, 0.0, 0.0))]
        )
    assert ledger.context(0, keys[0], [SampleId(0, 0)]).whiten is None
    assert ledger.denominators(0, 0, 0).whiten == pytest.approx((1.5, math.sqrt((10 - 9) / 3)))


JUDGED = [{"name": "a", "function": "x.py:a"}, {"name": "b", "function": "x.py:b", "weight": 0.5}, {"name": "m", "model": "m"}]


def judged(group: int, sample: int, a: float | None, b: float | None) -> Judged:
    return Judged(SampleId(group, sample), 0, {"a": a, "b": b}, 0, 0, Span(0, 0))


@pytest.mark.parametrize(
    ("group", "equal"),
    [
        ([(1.0, None), (1.0, None), (1.0, None)], True),
        ([(1.0, 0.0), (0.0, 2.0), (0.5, 1.0)], True),
        ([(1.0, 0.0), (1.0, 1.0), (1.0, 0.0)], False),
        ([(None, None), (1.0, None), (None, None)], True),
        ([(None, None), (1.0, None), (None, 1.0)], False),
    ],
)
def test_a_group_is_equal_when_its_weighted_rewards_are(group: list[tuple[float | None, float | None]], equal: bool) -> None:
    """Fewer than two rewards tell a group estimator nothing either."""
    ledger = Ledger(recipe(rewards=JUDGED, n=3))
    said = [ledger.add_judged(judged(4, sample, *rewards)) for sample, rewards in enumerate(group)]
    assert said == [False, False, equal]


def test_what_is_said_of_samples_goes_with_their_micro_batch_or_is_dropped() -> None:
    ledger = Ledger(recipe(rewards=JUDGED))
    for group in (0, 1):
        for sample in (1, 0):
            ledger.add_rollout(SampleId(group, sample), f"rollout {group}.{sample}")
            ledger.add_judged(judged(group, sample, float(group), 10.0 * sample))
    key = MicroBatchKey(0, 0, 0)
    ledger.add_score(key, 0, "of the model")
    rewards = {"a": (0.0, 1.0), "b": (10.0, 0.0)}
    chosen = [SampleId(0, 1), SampleId(1, 0)]
    assert ledger.scores(key, chosen) == ["of the model", PartialScores(rewards=rewards)]
    ledger.release(key, chosen)
    ledger.release(key, [SampleId(0, 0)])
    ledger.add_rollout(SampleId(1, 0), "again")  # of a group that is dropped, nothing has been released
    ledger.add_judged(judged(1, 0, 1.0, 0.0))
    assert {one.id.sample for one in ledger.drop(1)} == {0, 1}
    assert not ledger._rollouts and not ledger._judged and not ledger._scores


def test_a_sample_without_reward_is_left_out_of_baseline_and_denominator() -> None:
    samples = [report(0, 0, 1.0, 3), report(0, 1, None, 0), report(1, 0, 1.0, 2), report(1, 1, 0.0, 2)]
    ledger = Ledger(recipe(advantage_estimator="rloo"))
    keys = fill(ledger, [samples])
    advantages = ledger.context(0, keys[0], [s.id for s in samples]).outcome_advantages
    assert advantages == {SampleId(0, 0): 0, SampleId(0, 1): 0, SampleId(1, 0): 1, SampleId(1, 1): -1}
    assert ledger.denominators(0, 0, 0) == Denominators(tokens=7, sequences=3, samples=4, pairs=0)


def test_a_finished_step_leaves_nothing_behind() -> None:
    ledger = Ledger(recipe())
    fill(ledger, [SAMPLES])
    key = MicroBatchKey(0, 0, 0)
    ledger.add_rollout(SampleId(0, 0), "rollout")
    ledger.add_score(key, 1, "second")
    ledger.add_score(key, 0, "first")
    assert ledger.rollouts([SampleId(0, 0)]) == ["rollout"] and ledger.scores(key, [SampleId(0, 0)]) == ["first", "second", PartialScores()]
    ledger.release(key, [SampleId(0, 0)])
    assert [sample.id for sample in ledger.finish_step(0, 0)] == [SampleId(g, k) for g in (0, 1) for k in (0, 1)]
    assert not ledger._rollouts and not ledger._scores and not ledger._updates


@pytest.mark.parametrize("normalize", ["batch", "update"])
def test_statistics_of_an_update_have_the_same_bits_whatever_came_first(normalize: str) -> None:
    rewards = [{"name": "r", "model": "r", "normalize": "batch" if normalize == "batch" else "none"}]
    made = recipe("ppo" if normalize == "batch" else "reinforce_pp", rewards, normalize="none" if normalize == "batch" else "update")
    numbers = np.random.default_rng(0).normal(0.1, 1, 8)
    samples = [replace(report(i, 0, x, 3), moments=Moments(3, 3 * x, 5 * x**2)) for i, x in enumerate(numbers.tolist())]
    found = []
    for order in (samples, samples[::-1], samples[4:] + samples[:4]):
        ledger = Ledger(made)
        fill(ledger, [[sample] for sample in order])
        found.append(ledger.context(0, MicroBatchKey(0, 0, 0), [sample.id for sample in samples]))
    assert found[0] == found[1] == found[2]
