"""What holds of every loss: independence from padding, from what stands in it, and from how a batch is split."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.algorithms.losses import entropy_bonus, kl_loss, value_loss
from conveyor.algorithms.metrics import Max, Mean, merge
from conveyor.algorithms.mismatch import importance_weights, mismatch_metrics
from conveyor.algorithms.policy_losses import policy_loss
from conveyor.algorithms.preferences import dpo_loss
from tests.algorithms.batches import AGGREGATIONS, CORRECTIONS, KINDS, NAN, random_batch

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def all_losses(tensors, mask, aggregation):
    """name → (sum, metrics) of every loss on the same tensors; samples 1 and 2 are a pair, if they are there."""
    a, b, c, d, e = tensors
    losses = {
        kind: policy_loss(
            a, b, c, mask, aggregation=aggregation, importance_weights=importance_weights(b, d, mask, 2.0, correction), kind=kind, **CLIP
        )
        for kind, correction in zip(KINDS, CORRECTIONS, strict=True)
    }
    dual = policy_loss(a, b, c, mask, aggregation=aggregation, dual_clip=1.5, **CLIP)
    return losses | {
        "dual_clip": dual,
        "value": value_loss(a, b, e, mask, clip=0.2),
        "kl": kl_loss(a, d, mask, estimator="k3", aggregation=aggregation),
        "entropy": entropy_bonus(e, mask, aggregation),
        "mismatch": (torch.zeros(()), mismatch_metrics(b, d, mask, 1.2, "sequence_mask")),
    }


def pairs(tensors, mask, kind):
    """Of each two neighbours, [B] even."""
    places = torch.arange(len(mask))
    return dpo_loss(tensors[0], tensors[1], mask, 1.0 - 2 * (places % 2), places // 2, beta=0.3, kind=kind)


def check_parts(whole, parts, logprobs):
    """The parts' sums, metrics and gradients add up to the whole's."""
    loss, metrics = whole
    torch.testing.assert_close(sum(part for part, _ in parts), loss, atol=1e-5, rtol=1e-5)
    merged = merge(found for _, found in parts)
    assert merged.keys() == metrics.keys()
    for key, metric in metrics.items():
        assert merged[key].value == pytest.approx(metric.value, abs=1e-5)
        assert not isinstance(metric, Mean) or merged[key].count == metric.count
    if loss.requires_grad:
        (whole_grad,) = torch.autograd.grad(loss, logprobs)
        (split_grad,) = torch.autograd.grad(sum(part for part, _ in parts), logprobs)
        torch.testing.assert_close(split_grad, whole_grad, atol=1e-6, rtol=1e-5)


def split(tensors, kept, borders):
    return [([tensor[start:end] for tensor in tensors], kept[start:end]) for start, end in itertools.pairwise(borders)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 4)), aggregation=st.sampled_from(AGGREGATIONS))
def test_sums_and_metrics_of_micro_batches_add_up_to_those_of_the_batch(seed, cuts, aggregation):
    tensors, kept = random_batch(seed)
    tensors[0].requires_grad_()
    parts = [all_losses(*part, aggregation) for part in split(tensors, kept, [0, *sorted(cuts), 5])]
    for name, whole in all_losses(tensors, kept, aggregation).items():
        check_parts(whole, [part[name] for part in parts], tensors[0])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.sampled_from([2, 4, 6])), kind=st.sampled_from(["sigmoid", "ipo"]))
def test_pairs_of_micro_batches_add_up_to_those_of_the_batch(seed, cuts, kind):
    tensors, kept = random_batch(seed, samples=8)
    tensors[0].requires_grad_()
    parts = [pairs(*part, kind) for part in split(tensors, kept, [0, *sorted(cuts), 8])]
    check_parts(pairs(tensors, kept, kind), parts, tensors[0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("garbage", [0.0, NAN, float("inf"), -1e30])
def test_padding_and_what_stands_in_it_change_nothing(aggregation, garbage):
    tensors, kept = random_batch(3, samples=6)
    wider = [torch.cat([tensor.masked_fill(~kept, garbage), torch.full((6, 3), garbage)], dim=1) for tensor in tensors]
    wider[0].requires_grad_()
    wider_mask = torch.cat([kept, torch.zeros(6, 3, dtype=torch.bool)], dim=1)
    every = [
        all_losses(*both, aggregation) | {kind: pairs(*both, kind) for kind in ("sigmoid", "ipo")}
        for both in ((tensors, kept), (wider, wider_mask))
    ]
    for name, (loss, metrics) in every[0].items():
        padded, padded_metrics = every[1][name]
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
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for loss, metrics in [*all_losses(tensors, nothing, aggregation).values(), pairs(tensors, nothing, "ipo")]:
        assert loss.item() == 0
        assert all(metric.value == 0 for metric in metrics.values())
        assert "ratio/max" not in metrics
        if loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, tensors[0])
            assert (grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_case_4_policy_losses_stay_finite_at_any_log_ratio(kind, log_ratio, advantage):
    logprobs = torch.full((1, 2), log_ratio).requires_grad_()
    old, kept = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for correction in CORRECTIONS:
        weights = importance_weights(logprobs, old, kept, 2.0, correction)
        assert weights.isfinite().all()
        loss, metrics = policy_loss(
            logprobs, old, torch.full((1, 2), advantage), kept, aggregation="token_mean", importance_weights=weights, kind=kind, **CLIP
        )
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and grad.isfinite().all()
        metrics |= mismatch_metrics(logprobs, old, kept, 2.0, correction)
        assert all(math.isfinite(metric.value) for metric in metrics.values())
        assert isinstance(metrics["ratio/max"], Max)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
def test_case_4_pair_losses_stay_finite_at_any_log_ratio(kind, log_ratio):
    logprobs = torch.tensor([[log_ratio], [0.0]], requires_grad=True)
    loss, metrics = pairs([logprobs, torch.zeros(2, 1)], torch.ones(2, 1, dtype=torch.bool), kind)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert all(math.isfinite(metric.value) for metric in metrics.values())
