"""What losses are made of, value, KL and entropy: known right values (hand-computed)."""

import math

import numpy as np
import pytest
import torch

from conveyor.algorithms.losses import (
    LOG_RATIO_LIMIT,
    aggregate,
    bounded_exp,
    entropy_bonus,
    kl_estimate,
    kl_loss,
    sampled_logprobs,
    value_loss,
)
from conveyor.algorithms.metrics import Mean
from tests.algorithms.batches import NAN, mask, rows

# sampled log-probs -----------------------------------------------------------------------------------------------


def test_temperature_divides_the_logits_before_the_softmax():
    logits = torch.tensor([2.0, 0.0])
    assert sampled_logprobs(logits, torch.tensor(0), 0.5).item() == pytest.approx(-0.0181, abs=5e-5)
    assert sampled_logprobs(logits, torch.tensor(0), 1.0).item() == pytest.approx(-0.1269, abs=5e-5)


def test_logprobs_are_float32_whatever_the_logits_are():
    logits = torch.randn(2, 3, 11, dtype=torch.bfloat16)
    ids = torch.randint(0, 11, (2, 3))
    found = sampled_logprobs(logits, ids, 0.7)
    wanted = logits.double() / 0.7
    wanted = (wanted - wanted.logsumexp(-1, keepdim=True)).gather(-1, ids[..., None])[..., 0]
    assert found.dtype == torch.float32 and found.shape == (2, 3)
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-6)


# denominators ----------------------------------------------------------------------------------------------------


def test_aggregations_by_hand():
    values, kept = rows([1, 2, 6], [4, NAN, NAN], [NAN, NAN, NAN]), mask([1, 1, 1], [1, 0, 0], [0, 0, 0])
    assert aggregate(values, kept, "token_mean").item() == 13
    assert aggregate(values, kept, "sequence_mean").item() == 3 + 4
    assert aggregate(values, kept, "constant").item() == 13  # the caller divides by 3 samples × max_response_length


# value -----------------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    values, old, returns = rows([1.0, 1.0, 3.0]), rows([0.0, 0.9, 0.0]), rows([2.0, 2.0, 0.0])
    kept = mask([1, 1, 1])
    loss, metrics = value_loss(values, old, returns, kept, clip=None)
    assert loss.item() == pytest.approx(0.5 * (1 + 1 + 9))
    assert metrics["loss/value"] == Mean(pytest.approx(5.5), 3)
    # kept within ±0.5 of old: 0.5, 1.0, 0.5; squares 2.25, 1, 0.25; larger: 2.25, 1, 9
    loss, metrics = value_loss(values, old, returns, kept, clip=0.5)
    assert loss.item() == pytest.approx(0.5 * (2.25 + 1 + 9))
    assert metrics["value_clip_fraction"] == Mean(1.0, 3)


# KL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [-100.0, -LOG_RATIO_LIMIT, -1.0, 0.0, 1.0, 100.0])
def test_kl_estimates_are_finite_with_finite_gradient(estimator, log_ratio):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1), estimator)
    estimate.sum().backward()
    assert estimate.isfinite().all() and logprobs.grad.isfinite().all()
    if estimator != "k1":  # k1's gradient is 1 everywhere; the others pull the policy back to the reference
        assert estimate.item() >= 0
        assert np.sign(logprobs.grad.item()) == np.sign(log_ratio)


def test_kl_estimates_by_hand():
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
    torch.testing.assert_close(kl_estimate(logprobs, reference, "k1"), torch.tensor([1.0, -0.5]))
    torch.testing.assert_close(kl_estimate(logprobs, reference, "k2"), torch.tensor([0.5, 0.125]))
    torch.testing.assert_close(kl_estimate(logprobs, reference, "k3"), torch.tensor([math.exp(-1), math.exp(0.5) - 1.5]))


@pytest.mark.parametrize(("estimator", "error"), [("k1", 1e-4), ("k2", 0.2), ("k3", 1e-4)])
def test_kl_estimators_estimate_the_kl(estimator, error):
    """Expectation over tokens of π, taken exactly: k1 and k3 are unbiased, k2 is close for near policies."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator)
    logprobs = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(logits + 0.3 * torch.randn(50, generator=generator), 0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    found = (logprobs.exp() * kl_estimate(logprobs, reference, estimator)).sum()
    assert found.item() == pytest.approx(kl.item(), rel=error)


def test_kl_and_entropy_metrics_are_token_means():
    kept = mask([1, 1], [1, 0])
    loss, metrics = kl_loss(rows([1, 2], [4, NAN]), torch.zeros(2, 2), kept, estimator="k1", aggregation="sequence_mean")
    assert loss.item() == 1.5 + 4 and metrics["kl"] == Mean(7.0, 3)
    loss, metrics = entropy_bonus(rows([1, 2], [4, NAN]), kept, "sequence_mean")
    assert loss.item() == 1.5 + 4 and metrics["entropy"] == Mean(7.0, 3)


def test_bounded_exp_is_exp_then_its_tangent():
    x = torch.tensor([-200.0, 0.0, 3.0, LOG_RATIO_LIMIT, LOG_RATIO_LIMIT + 2], requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    e = math.exp(LOG_RATIO_LIMIT)
    torch.testing.assert_close(y, torch.tensor([0.0, 1.0, math.exp(3), e, 3 * e]))
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 1.0, math.exp(3), e, e]))
