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
    kl_penalty,
    moments,
    place_rewards,
    whiten,
    whitening,
)
from conveyor.algorithms.metrics import Moments

NAN = float("nan")
ESTIMATORS = ("group_norm", "dr_grpo", "rloo")


def mask(*values):
    return torch.tensor(values, dtype=torch.bool)


# rewards per token -----------------------------------------------------------------------------------------------


def test_the_score_goes_to_the_last_response_token():
    found = place_rewards(torch.tensor([1.0, 2.0, 3.0, NAN]), mask([1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]))
    assert found.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_kl_penalty_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    found = kl_penalty(logprobs, torch.tensor([[-3.0, -1.0, 0.0]]), mask([1, 1, 0]), kl_coef=0.1)
    torch.testing.assert_close(found, torch.tensor([[-0.2, 0.1, 0.0]]))
    assert not found.requires_grad


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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    assert group_advantages([0.1, 0.1, 0.1], estimator) == [0, 0, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_sample_without_reward_is_left_out_of_the_baseline(estimator):
    with_none = group_advantages([1.0, None, 3.0, 5.0], estimator)
    without = group_advantages([1.0, 3.0, 5.0], estimator)
    assert with_none == [without[0], 0.0, *without[1:]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("outcomes", [[], [2.0], [None, 2.0], [None, None]])
def test_fewer_than_two_outcomes_give_zero(estimator, outcomes):
    assert group_advantages(outcomes, estimator) == [0.0] * len(outcomes)


@settings(max_examples=60, deadline=None)
@given(outcomes=st.lists(st.floats(-100, 100), min_size=2, max_size=8), shift=st.floats(-10, 10), estimator=st.sampled_from(ESTIMATORS))
def test_advantages_sum_to_zero_and_do_not_see_a_shift(outcomes, shift, estimator):
    found = group_advantages(outcomes, estimator)
    assert all(math.isfinite(a) for a in found)
    assert sum(found) == pytest.approx(0, abs=1e-6)
    assert group_advantages([r + shift for r in outcomes], estimator) == pytest.approx(found, abs=1e-6, rel=1e-6)


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
