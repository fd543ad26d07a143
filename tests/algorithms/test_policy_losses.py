"""Policy losses: known right values (hand-computed)."""

import math

import pytest
import torch

from conveyor.algorithms.metrics import Max, Mean, merge
from conveyor.algorithms.mismatch import importance_weights
from conveyor.algorithms.policy_losses import policy_loss
from tests.algorithms.batches import KINDS, mask, rows

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def surrogate(logprobs, old_logprobs, advantages, kept=None, aggregation="token_mean", **more):
    """`policy_loss` with clip 0.2, over all tokens unless told otherwise."""
    kept = torch.ones_like(advantages, dtype=torch.bool) if kept is None else kept
    return policy_loss(logprobs, old_logprobs, advantages, kept, aggregation=aggregation, **(CLIP | more))


def test_case_1_a_token_mean_over_two_micro_batches_of_unequal_length():
    """Token losses [1, 1, 1, 1] and [5]: the mean of the update is 9/5, not the mean of the means, 3."""
    parts = [surrogate(torch.zeros(1, n), torch.zeros(1, n), torch.full((1, n), -loss)) for n, loss in ((4, 1.0), (1, 5.0))]
    assert sum(loss for loss, _ in parts).item() / 5 == pytest.approx(1.8)
    assert merge(metrics for _, metrics in parts)["loss/policy"] == Mean(9.0, 5)


def test_sequence_mean_counts_only_sequences_with_tokens():
    kept = mask([1, 1], [0, 0])
    _, metrics = surrogate(torch.zeros(2, 2), torch.zeros(2, 2), rows([1, 3], [9, 9]), kept, aggregation="sequence_mean")
    assert metrics["loss/policy"] == Mean(-2.0, 1)
    assert metrics["clip_fraction"] == Mean(0.0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_case_3_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped(kind):
    logprobs = torch.randn(3, 4).requires_grad_()
    advantages = torch.randn(3, 1).expand(-1, 4)
    loss, metrics = surrogate(logprobs, logprobs.detach(), advantages, kind=kind)
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


def test_beyond_the_float_range_the_ratio_still_pushes_the_right_way():
    logprobs = rows([100.0, -100.0]).requires_grad_()
    loss, _ = surrogate(logprobs, rows([0, 0]), rows([-1, -1]))
    loss.backward()
    assert logprobs.grad.isfinite().all() and logprobs.grad[0, 0] > 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # c = 3: only where A < 0 and r > 3 is anything else than the clipped surrogate with bounds 0.8 and 1.2
        (5.0, -2.0, 6.0, 0.0),
        (2.5, -2.0, 5.0, 5.0),
        (0.5, -2.0, 1.6, 0.0),
        (5.0, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]]).requires_grad_()
    found, metrics = surrogate(logprobs, rows([0.0]), rows([advantage]), dual_clip=3.0)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-6)
    assert metrics["clip_fraction"] == Mean(1.0 if slope == 0 else 0.0, 1)


def test_gspo_by_hand():
    """Log-ratios 0.3 and −0.1, mean 0.1: s = e^0.1, and every token has 1/2 of the sequence's gradient."""
    logprobs = rows([0.3, -0.1, 9.0], [-0.5, 7.0, -0.7]).requires_grad_()
    kept, advantages = mask([1, 1, 0], [1, 0, 1]), rows([2, 2, 9], [2, 9, 2])
    found, metrics = surrogate(logprobs, torch.zeros(2, 3), advantages, kept, "sequence_mean", kind="gspo")
    found.backward()
    first, second = math.exp(0.1), math.exp(-0.6)  # 0.55 is below 1 − 0.2, which with A > 0 is not cut
    assert found.item() == pytest.approx(-2 * first - 2 * second)
    torch.testing.assert_close(logprobs.grad, rows([-first, -first, 0], [-second, 0, -second]))
    assert metrics["ratio/max"].value == pytest.approx(first) and metrics["clip_fraction"] == Mean(0.0, 4)


def test_gspo_clips_whole_sequences():
    logprobs = rows([0.5, 0.3, 0.0], [0.1, 0.0, 0.0]).requires_grad_()
    kept = mask([1, 1, 0], [1, 1, 1])
    found, metrics = surrogate(logprobs, torch.zeros(2, 3), torch.ones(2, 3), kept, "sequence_mean", kind="gspo")
    found.backward()
    assert found.item() == pytest.approx(-1.2 - math.exp(0.1 / 3))
    assert logprobs.grad[0].tolist() == [0, 0, 0]
    assert metrics["clip_fraction"] == Mean(2.0, 5)


def test_cispo_by_hand():
    """Ratios 1.5 → 1.2, 0.5 → 0.8 and 1.1: weights of the gradient, which no token loses."""
    logprobs = rows([-1.0, -2.0, -3.0]).requires_grad_()
    old = logprobs.detach() - torch.tensor([[1.5, 0.5, 1.1]]).log()
    found, metrics = surrogate(logprobs, old, rows([2, -1, 1]), kind="cispo")
    found.backward()
    torch.testing.assert_close(logprobs.grad, rows([-2.4, 0.8, -1.1]))
    assert found.item() == pytest.approx(2.4 * 1 - 0.8 * 2 + 1.1 * 3, rel=1e-6)
    assert metrics["clip_fraction"] == Mean(2.0, 3) and metrics["ratio/max"].value == pytest.approx(1.5)


def test_policy_gradient_by_hand():
    logprobs = rows([-1.0, -2.0]).requires_grad_()
    found, metrics = surrogate(logprobs, rows([-5.0, -1.0]), rows([2, -1]), kind="policy_gradient")
    found.backward()
    assert found.item() == 2 - 2 and logprobs.grad.tolist() == [[-2, 1]]
    assert metrics["clip_fraction"] == Mean(0.0, 2) and metrics["ratio/max"].value == pytest.approx(math.exp(4))


@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights_scale_each_token(kind):
    logprobs = rows([-1.0, -1.0, -1.0, 0.0]).requires_grad_()
    kept = mask([1, 1, 1, 0])
    weights = importance_weights(logprobs, rows([-0.5, -1.5, -200.0, 0.0]), kept, cap=2.0)
    found, _ = surrogate(logprobs, logprobs.detach(), torch.ones(1, 4), kept, kind=kind, importance_weights=weights)
    found.backward()
    wanted = rows([math.exp(-0.5), math.exp(0.5), 2.0])
    if kind == "gspo":  # one ratio, whose gradient all tokens share
        wanted = wanted.mean().expand(1, 3)
    torch.testing.assert_close(logprobs.grad[:, :3], -wanted)


def test_the_constant_denominator_weighs_a_token_alike_in_long_and_short_answers():
    """Dr. GRPO: 2 samples of 3 and 1 tokens, max_response_length 4 → every token's gradient is −A/8."""
    logprobs = torch.zeros(2, 3, requires_grad=True)
    found, metrics = surrogate(logprobs, torch.zeros(2, 3), torch.ones(2, 3), mask([1, 1, 1], [1, 0, 0]), "constant")
    (found / (2 * 4)).backward()
    torch.testing.assert_close(logprobs.grad, rows([-1 / 8] * 3, [-1 / 8, 0, 0]))
    assert metrics["loss/policy"] == Mean(-4.0, 4)
