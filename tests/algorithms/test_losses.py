"""Losses: known right values (hand-computed), independence from padding and from how a batch is split."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.algorithms.losses import (
    LOG_RATIO_LIMIT,
    aggregate,
    bounded_exp,
    entropy_bonus,
    importance_weights,
    kl_estimate,
    kl_loss,
    policy_loss,
    sampled_logprobs,
    value_loss,
)
from conveyor.algorithms.metrics import Max, Mean, merge

NAN = float("nan")
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
AGGREGATIONS = ("token_mean", "sequence_mean")


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


def mask(*values):
    return torch.tensor(values, dtype=torch.bool)


def surrogate(logprobs, old_logprobs, advantages, kept=None, aggregation="token_mean", **more):
    """`policy_loss` with clip 0.2, over all tokens unless told otherwise."""
    kept = torch.ones_like(advantages, dtype=torch.bool) if kept is None else kept
    return policy_loss(logprobs, old_logprobs, advantages, kept, aggregation=aggregation, **(CLIP | more))


def random_batch(seed, samples=5, tokens=6):
    """Log-probs, old log-probs, advantages, values … [B, S] each, and a mask of right-padded responses (one of them empty)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(samples, tokens, generator=generator) for _ in range(5)]
    lengths = torch.randint(0, tokens + 1, (samples,), generator=generator)
    lengths[0] = 0
    return tensors, torch.arange(tokens) < lengths[:, None]


def all_losses(tensors, mask, aggregation):
    """name → (sum, metrics) of every loss on the same tensors."""
    a, b, c, d, e = tensors
    weights = importance_weights(b, d, mask, cap=2.0)
    return {
        "policy": policy_loss(a, b, c, mask, aggregation=aggregation, importance_weights=weights, **CLIP),
        "value": value_loss(a, b, e, mask, clip=0.2),
        "kl": kl_loss(a, d, mask, estimator="k3", aggregation=aggregation),
        "entropy": entropy_bonus(e, mask, aggregation),
    }


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


def test_a_token_mean_over_two_micro_batches_of_unequal_length():
    """Token losses [1, 1, 1, 1] and [5]: the mean of the update is 9/5, not the mean of the means, 3."""
    parts = [surrogate(torch.zeros(1, n), torch.zeros(1, n), torch.full((1, n), -loss)) for n, loss in ((4, 1.0), (1, 5.0))]
    assert sum(loss for loss, _ in parts).item() / 5 == pytest.approx(1.8)
    assert merge(metrics for _, metrics in parts)["loss/policy"] == Mean(9.0, 5)


def test_aggregations_by_hand():
    values, kept = rows([1, 2, 6], [4, NAN, NAN], [NAN, NAN, NAN]), mask([1, 1, 1], [1, 0, 0], [0, 0, 0])
    assert aggregate(values, kept, "token_mean").item() == 13
    assert aggregate(values, kept, "sequence_mean").item() == 3 + 4


def test_sequence_mean_counts_only_sequences_with_tokens():
    kept = mask([1, 1], [0, 0])
    _, metrics = surrogate(torch.zeros(2, 2), torch.zeros(2, 2), rows([1, 3], [9, 9]), kept, aggregation="sequence_mean")
    assert metrics["loss/policy"] == Mean(-2.0, 1)
    assert metrics["clip_fraction"] == Mean(0.0, 2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 4)), aggregation=st.sampled_from(AGGREGATIONS))
def test_sums_and_metrics_of_micro_batches_add_up_to_those_of_the_batch(seed, cuts, aggregation):
    tensors, kept = random_batch(seed)
    tensors[0].requires_grad_()
    borders = [0, *sorted(cuts), 5]
    parts = [
        all_losses([tensor[start:end] for tensor in tensors], kept[start:end], aggregation) for start, end in itertools.pairwise(borders)
    ]
    for name, (whole, whole_metrics) in all_losses(tensors, kept, aggregation).items():
        torch.testing.assert_close(sum(part[name][0] for part in parts), whole, atol=1e-5, rtol=1e-5)
        merged = merge(part[name][1] for part in parts)
        assert merged.keys() == whole_metrics.keys()
        for key, metric in whole_metrics.items():
            assert merged[key].value == pytest.approx(metric.value, abs=1e-5)
            assert not isinstance(metric, Mean) or merged[key].count == metric.count
        if whole.requires_grad:
            (whole_grad,) = torch.autograd.grad(whole, tensors[0])
            (split_grad,) = torch.autograd.grad(sum(part[name][0] for part in parts), tensors[0])
            torch.testing.assert_close(split_grad, whole_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("garbage", [0.0, NAN, float("inf"), -1e30])
def test_padding_and_what_stands_in_it_change_nothing(aggregation, garbage):
    tensors, kept = random_batch(3)
    wider = [torch.cat([tensor.masked_fill(~kept, garbage), torch.full((5, 3), garbage)], dim=1) for tensor in tensors]
    wider[0].requires_grad_()
    wider_mask = torch.cat([kept, torch.zeros(5, 3, dtype=torch.bool)], dim=1)
    for name, (loss, metrics) in all_losses(tensors, kept, aggregation).items():
        padded, padded_metrics = all_losses(wider, wider_mask, aggregation)[name]
        torch.testing.assert_close(padded, loss, atol=1e-6, rtol=1e-6)
        assert {k: m.value for k, m in padded_metrics.items()} == pytest.approx({k: m.value for k, m in metrics.items()}, abs=1e-6)
        if padded.requires_grad:
            (grad,) = torch.autograd.grad(padded, wider[0])
            assert grad.isfinite().all() and (grad[~wider_mask] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_loss_tokens_has_loss_zero_and_gradient_zero(aggregation):
    """As when every sample was truncated and truncated samples are masked."""
    tensors = [torch.full((2, 3), NAN) for _ in range(5)]
    tensors[0].requires_grad_()
    for loss, metrics in all_losses(tensors, torch.zeros(2, 3, dtype=torch.bool), aggregation).values():
        assert loss.item() == 0
        assert all(math.isfinite(metric.value) for metric in metrics.values())
        assert not any(isinstance(metric, Max) for metric in metrics.values())
        if loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, tensors[0])
            assert (grad == 0).all()


# policy ----------------------------------------------------------------------------------------------------------


def test_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped():
    logprobs = torch.randn(3, 4).requires_grad_()
    advantages = torch.randn(3, 4)
    loss, metrics = surrogate(logprobs, logprobs.detach(), advantages)
    assert metrics["ratio/max"] == Max(1.0)
    assert metrics["clip_fraction"] == Mean(0.0, 12)
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, -advantages)  # the plain policy gradient


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # slope: d loss / d log-prob = −ratio·A where not clipped; bounds 0.9 and 1.3
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.8, 0.0),
        (0.95, -2.0, 1.9, 1.9),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]]).requires_grad_()
    found, metrics = surrogate(logprobs, rows([0.0]), rows([advantage]), clip_low=0.1, clip_high=0.3)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-6)
    assert metrics["clip_fraction"] == Mean(1.0 if slope == 0 else 0.0, 1)
    assert metrics["ratio/max"].value == pytest.approx(ratio)


def test_importance_weights_are_truncated_and_scale_each_token():
    old = rows([0.0, 0.0, 0.0, 5.0]).requires_grad_()
    weights = importance_weights(old, rows([0.5, -0.5, -200.0, NAN]), mask([1, 1, 1, 0]), cap=2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, rows([math.exp(-0.5), math.exp(0.5), 2.0, 0.0]))
    loss, metrics = surrogate(torch.zeros(1, 4), torch.zeros(1, 4), torch.ones(1, 4), mask([1, 1, 1, 0]), importance_weights=weights)
    assert loss.item() == pytest.approx(-(math.exp(-0.5) + math.exp(0.5) + 2))
    assert metrics["importance_weight/mean"].value == pytest.approx(-loss.item() / 3)


def test_the_ratio_stays_finite_at_any_log_ratio():
    logprobs = rows([100.0, -100.0]).requires_grad_()
    loss, metrics = surrogate(logprobs, rows([0, 0]), rows([-1, -1]))
    loss.backward()
    assert math.isfinite(loss.item()) and math.isfinite(metrics["ratio/max"].value)
    assert logprobs.grad.isfinite().all() and logprobs.grad[0, 0] > 0


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
