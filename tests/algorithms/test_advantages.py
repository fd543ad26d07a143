"""Rewards and advantages: known right values, NumPy re-computation from the papers' equations, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.algorithms.advantages import (
    gae,
    group_advantages,
    group_baselines,
    kl_penalty,
    moments,
    normalize_group,
    place_rewards,
    returns_to_go,
    sample_moments,
    whiten,
    whitening,
)
from conveyor.algorithms.metrics import Moments
from tests.algorithms.batches import NAN, mask

ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "opo", "best_worst")
LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6)


def advantages_of(outcomes, estimator):
    """`group_advantages` of samples with the lengths of above."""
    return group_advantages(outcomes, estimator, LENGTHS[: len(outcomes)])


# rewards per token -----------------------------------------------------------------------------------------------


def test_the_score_goes_to_the_last_response_token():
    found = place_rewards(torch.tensor([1.0, 2.0, 3.0, NAN]), mask([1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]))
    assert found.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_kl_penalty_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    found = kl_penalty(logprobs, torch.tensor([[-3.0, -1.0, 0.0]]), mask([1, 1, 0]), kl_coef=0.1)
    torch.testing.assert_close(found, torch.tensor([[-0.2, 0.1, 0.0]]))
    assert not found.requires_grad


def test_kl_penalty_with_other_estimators():
    logprobs, reference, kept = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-3.0, -1.0, 0.0]]), mask([1, 1, 0])
    torch.testing.assert_close(kl_penalty(logprobs, reference, kept, 0.1, "k2"), torch.tensor([[-0.2, -0.05, 0.0]]))
    k3 = torch.tensor([[-0.1 * (math.exp(-2) + 1), -0.1 * (math.e - 2), 0.0]])
    torch.testing.assert_close(kl_penalty(logprobs, reference, kept, 0.1, "k3"), k3)
    assert kl_penalty(torch.tensor([[-100.0, 0.0]]), torch.tensor([[0.0, -100.0]]), mask([1, 1]), 0.1, "k3").isfinite().all()


# returns -----------------------------------------------------------------------------------------------------------


def test_returns_by_hand():
    rewards, kept = torch.tensor([[1.0, NAN, 2.0, 4.0, NAN], [NAN] * 5]), mask([1, 0, 1, 1, 0], [0] * 5)
    assert returns_to_go(rewards, kept, 0.5).tolist() == [[3.0, 0, 4.0, 4.0, 0], [0.0] * 5]
    assert returns_to_go(rewards, kept, 1.0).tolist() == [[7.0, 0, 6.0, 4.0, 0], [0.0] * 5]
    assert returns_to_go(rewards, kept, 0.0).tolist() == [[1.0, 0, 2.0, 4.0, 0], [0.0] * 5]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_are_those_of_gae_with_lambda_1(seed, gamma):
    """Σ (γλ)^l δ telescopes: with λ = 1, advantage + value is the discounted sum of rewards, whatever the values."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(3, 7, generator=generator), torch.randn(3, 7, generator=generator)
    kept = torch.rand(3, 7, generator=generator) < 0.7
    _, returns = gae(rewards, values, kept, gamma, lam=1.0)
    torch.testing.assert_close(returns_to_go(rewards, kept, gamma), returns, atol=1e-5, rtol=1e-5)


# GAE -------------------------------------------------------------------------------------------------------------


def test_gae_ignores_padding():
    advantages, returns = gae(torch.tensor([[1.5, 1, 2, 2]]), torch.zeros(1, 4), mask([1, 1, 0, 0]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[2.5, 1, 0, 0]]
    assert returns.tolist() == [[2.5, 1, 0, 0]]


def gae_from_the_definition(rewards, values, gamma, lam):
    """Schulman et al. 2015, eq. 16, as a double sum: A_t = Σ_l (γλ)^l δ_(t+l)."""
    after = np.append(values[1:], 0.0)
    deltas = rewards + gamma * after - values
    n = len(rewards)
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 7), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_definition_wherever_the_masked_tokens_are(seed, length, gamma, lam):
    random = np.random.default_rng(seed)
    rewards, values = random.normal(size=length), random.normal(size=length)
    wanted = gae_from_the_definition(rewards, values, gamma, lam)
    places = np.sort(random.choice(10, size=length, replace=False))
    wide_rewards, wide_values, kept = torch.full((1, 10), NAN), torch.full((1, 10), NAN), torch.zeros(1, 10, dtype=torch.bool)
    wide_rewards[0, places], wide_values[0, places], kept[0, places] = torch.tensor(rewards).float(), torch.tensor(values).float(), True
    advantages, returns = gae(wide_rewards, wide_values, kept, gamma, lam)
    np.testing.assert_allclose(advantages[kept], wanted, atol=1e-5)
    np.testing.assert_allclose(returns[kept], wanted + values, atol=1e-5)
    assert (advantages[~kept] == 0).all() and (returns[~kept] == 0).all()


def test_gae_of_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    kept = torch.arange(6) < torch.tensor([[6], [2], [0], [4]])
    together, _ = gae(rewards, values, kept, 0.99, 0.95)
    for i in range(4):
        alone, _ = gae(rewards[i : i + 1], values[i : i + 1], kept[i : i + 1], 0.99, 0.95)
        torch.testing.assert_close(alone[0], together[i], atol=0, rtol=0)


# groups ----------------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    # mean 2; the means of the others are 7/3, 5/3, 4/3 and 8/3
    outcomes = [1.0, 3.0, 4.0, 0.0]
    std = math.sqrt((1 + 1 + 4 + 4) / 3)
    assert group_advantages(outcomes, "dr_grpo") == pytest.approx([-1, 1, 2, -2])
    assert group_advantages(outcomes, "group_norm") == pytest.approx([a / (std + 1e-4) for a in (-1, 1, 2, -2)])
    assert group_advantages(outcomes, "rloo") == pytest.approx([1 - 7 / 3, 3 - 5 / 3, 4 - 4 / 3, 0 - 8 / 3])


def test_opo_by_hand():
    """Baseline (10·1 + 30·0 + 20·3) / 60 = 7/6; the fourth sample has no outcome, so its length does not count."""
    found = group_advantages([1.0, 0.0, 3.0, None], "opo", [10, 30, 20, 500])
    assert found == pytest.approx([1 - 7 / 6, -7 / 6, 3 - 7 / 6, 0])
    assert group_advantages([1.0, 0.0, 3.0], "opo", [8, 8, 8]) == pytest.approx(group_advantages([1.0, 0.0, 3.0], "dr_grpo"))


def test_opo_minimises_the_variance_where_the_gradient_s_size_goes_with_length():
    """Hao et al. 2025: the baseline that minimises Σ l·(r − b)²."""
    outcomes, lengths = [1.0, 0.0, 3.0], [10, 30, 20]
    baseline = outcomes[0] - group_advantages(outcomes, "opo", lengths)[0]
    spread = lambda b: sum(length * (r - b) ** 2 for r, length in zip(outcomes, lengths, strict=True))  # noqa: E731
    assert all(spread(baseline) < spread(baseline + step) for step in (-0.01, 0.01))


def test_best_worst_by_hand():
    assert group_advantages([1.0, None, 3.0, 0.0, 3.0, 0.0], "best_worst") == [0, 0, 1, -1, 0, 0]
    assert group_advantages([2.0, 5.0], "best_worst") == [-1, 1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_20_equal_rewards_give_exactly_zero(estimator):
    assert advantages_of([0.1, 0.1, 0.1], estimator) == [0, 0, 0]
    assert normalize_group(advantages_of([0.1, None, 0.1], estimator), [0.1, None, 0.1]) == [0, 0, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_sample_without_reward_is_left_out_of_the_baseline(estimator):
    with_none = group_advantages([1.0, None, 3.0, 5.0], estimator, [2, 7, 3, 4])
    without = group_advantages([1.0, 3.0, 5.0], estimator, [2, 3, 4])
    assert with_none == [without[0], 0.0, *without[1:]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("outcomes", [[], [2.0], [None, 2.0], [None, None]])
def test_fewer_than_two_outcomes_give_zero(estimator, outcomes):
    assert advantages_of(outcomes, estimator) == [0.0] * len(outcomes)
    assert normalize_group([0.0] * len(outcomes), outcomes) == [0.0] * len(outcomes)


@settings(max_examples=60, deadline=None)
@given(outcomes=st.lists(st.floats(-100, 100), min_size=2, max_size=8), shift=st.floats(-10, 10), estimator=st.sampled_from(ESTIMATORS))
def test_advantages_sum_to_zero_and_do_not_see_a_shift(outcomes, shift, estimator):
    found = advantages_of(outcomes, estimator)
    assert all(math.isfinite(a) for a in found)
    weights = LENGTHS if estimator == "opo" else [1] * len(LENGTHS)  # opo's are weighted with the lengths
    assert sum(w * a for w, a in zip(weights, found, strict=False)) == pytest.approx(0, abs=1e-6)
    shifted = [r + shift for r in outcomes]
    if estimator != "best_worst" or len(set(shifted)) == len(set(outcomes)):  # a shift may round two outcomes to one
        assert advantages_of(shifted, estimator) == pytest.approx(found, abs=1e-6, rel=1e-6)


@given(outcomes=st.lists(st.none() | st.floats(-100, 100), max_size=8))
def test_dr_grpo_normalised_is_group_norm(outcomes):
    assert normalize_group(group_advantages(outcomes, "dr_grpo"), outcomes) == group_advantages(outcomes, "group_norm")


@settings(max_examples=50, deadline=None)
@given(outcomes=st.lists(st.floats(-100, 100), min_size=2, max_size=8), estimator=st.sampled_from(("rloo", "opo")))
def test_a_normalised_group_has_mean_0_and_the_deviation_of_group_norm(outcomes, estimator):
    found = np.array(normalize_group(advantages_of(outcomes, estimator), outcomes))
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) <= 1 + 1e-9


def test_baselines_by_hand():
    assert group_baselines([1.0, None, 3.0, 5.0], "reinforce_pp_baseline") == [3.0] * 4
    assert group_baselines([1.0, None, 3.0, 5.0], "remax") == [5.0] * 4
    assert group_baselines([1.0, 3.0, None], "remax") == [0.0] * 3
    assert group_baselines([None, None], "reinforce_pp_baseline") == [0.0] * 2
    assert group_baselines([0.1, 0.1, 0.1], "reinforce_pp_baseline") == [0.1] * 3
    assert group_baselines([], "remax") == []


# whitening -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6))
def test_whitening_from_added_moments_is_whitening_of_the_whole(seed, cut):
    generator = torch.Generator().manual_seed(seed)
    advantages = 3 + 2 * torch.randn(6, 5, generator=generator)
    kept = torch.rand(6, 5, generator=generator) < 0.7
    kept[0, :2] = True
    whole = moments(advantages[:cut], kept[:cut]) + moments(advantages[cut:], kept[cut:])
    mean, std = whitening(whole)
    assert mean == pytest.approx(advantages[kept].mean().item(), rel=1e-5)
    assert std == pytest.approx(advantages[kept].std().item(), rel=1e-5)
    white = whiten(advantages.masked_fill(~kept, NAN), kept, mean, std)
    assert white[kept].mean().item() == pytest.approx(0, abs=1e-5)
    assert white[kept].std().item() == pytest.approx(1, rel=1e-4)
    assert (white[~kept] == 0).all()


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [7.0], [], [0.0, 0.0]])
def test_whitening_of_equal_advantages_is_zero_not_noise(values):
    advantages = torch.tensor([[*values, NAN]])
    kept = torch.tensor([[True] * len(values) + [False]])
    mean, std = whitening(moments(advantages, kept))
    assert std == 0 and math.isfinite(mean)
    assert (whiten(advantages, kept, mean, std) == 0).all()


def test_moments_of_nothing():
    assert moments(torch.full((1, 2), NAN), mask([0, 0])) == Moments(0, 0.0, 0.0)


def test_moments_by_sample_are_shifted_by_its_baseline():
    generator = torch.Generator().manual_seed(2)
    returns, kept = torch.randn(4, 5, generator=generator), torch.rand(4, 5, generator=generator) < 0.7
    baselines = [1.0, -2.0, 0.5, 0.0]
    by_sample = sample_moments(returns.masked_fill(~kept, NAN), kept)
    assert len(by_sample) == 4 and by_sample[0] == moments(returns[:1], kept[:1])
    found = Moments(0, 0.0, 0.0)
    for sample, baseline in zip(by_sample, baselines, strict=True):
        found = found + sample.shifted(-baseline)
    wanted = (returns - torch.tensor(baselines)[:, None])[kept]
    assert whitening(found) == pytest.approx((wanted.mean().item(), wanted.std().item()), rel=1e-5)


@pytest.mark.parametrize("score", [0.1, -7.3, 1e5])
def test_returns_that_equal_their_baselines_are_whitened_to_zero_not_noise(score):
    """Equal rewards in every group: what is left after the baseline is float32 rounding."""
    kept = mask([1, 1, 1], [1, 0, 0])
    returns = returns_to_go(place_rewards(torch.tensor([score, 2 * score]), kept), kept, 1.0)
    first, second = sample_moments(returns, kept)
    mean, std = whitening(first.shifted(-score) + second.shifted(-2 * score))
    assert std == 0
    assert (whiten(returns, kept, mean, std) == 0).all()


def test_the_rounding_of_a_kl_is_no_advantage() -> None:
    """Equal rewards less a KL of a policy to itself, which is 0 but for float32: Adam would make full steps of the difference."""
    outcomes = [1.0 + noise for noise in (4e-8, -3e-8, 1e-8, 0.0)]
    for estimator in ("group_norm", "dr_grpo", "rloo", "opo", "best_worst"):
        assert group_advantages(outcomes, estimator, [3, 4, 5, 6]) == [0.0] * 4  # type: ignore[arg-type]
        assert group_advantages([noise - 1.0 for noise in outcomes], estimator, [3, 4, 5, 6]) == [0.0] * 4  # type: ignore[arg-type]
    noise = torch.tensor([[4e-8, -3e-8, 1e-8, 0.0]])
    assert whitening(moments(noise, torch.ones(1, 4, dtype=torch.bool)))[1] == 0.0
    assert any(group_advantages([0.0, 1e-3], "rloo")) and whitening(moments(1e4 * noise, torch.ones(1, 4, dtype=torch.bool)))[1] > 0
