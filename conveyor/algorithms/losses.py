"""Losses on sampled tokens: pure functions of tensors.

Every loss returns `(sum, metrics)`. The sum runs over tokens or over sequences and is never divided by
their number: an update is made of many micro-batches on many ranks, and only whoever has seen all of them
knows the denominator (`Denominators`), which is applied once, just before the optimizer step.

Shapes: B samples, S response tokens, V vocabulary. `mask` is bool [B, S], True for tokens in the loss. What
stands at masked places never matters, not even NaN: it is replaced before anything is computed from it, since
a NaN that is only masked afterwards still poisons the gradient (0 · NaN).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from conveyor.algorithms.metrics import Max, Mean, Metrics

Aggregation = Literal["token_mean", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Exponentials of log-ratios are exact up to this exponent; see `bounded_exp`."""


def sampled_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of `ids` under softmax(logits / temperature).

    logits [..., V] of any float type, ids int64 [...] → float32 [...]. Logits [2, 0] at temperature 0.5 give token 0
    log-prob −0.0181. Materialises [..., V] in float32: callers chunk over tokens.
    """
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp(x) up to x = `LOG_RATIO_LIMIT`, then on along its tangent.

    Value and gradient stay finite, and the gradient keeps its sign. (Clamping the exponent would make it 0: k3 would
    then push a policy that has fallen far below the reference further down.)
    """
    beyond = torch.relu(exponent - LOG_RATIO_LIMIT)
    return torch.exp(exponent.clamp(max=LOG_RATIO_LIMIT)) * (1 + beyond)


def aggregate(values: Tensor, mask: Tensor, aggregation: Aggregation) -> Tensor:
    """[B, S] → scalar. `token_mean`: sum over tokens; `sequence_mean`: sum over sequences of each one's mean over its tokens.

    The caller divides by the number of tokens, or of sequences with at least one token in the loss.
    """
    values = values.masked_fill(~mask, 0)
    if aggregation == "token_mean":
        return values.sum()
    return (values.sum(1) / mask.sum(1).clamp(min=1)).sum()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = π/π_old (Schulman et al. 2017, eq. 7).

    All tensors [B, S]. `importance_weights` (see the function of that name) multiply each token's loss.
    Metrics: `loss/policy`; `clip_fraction`, the share of tokens whose gradient the clip has cut; `ratio/max`;
    with weights `importance_weight/mean`.
    """
    logprobs, old_logprobs, advantages = _zero_masked(mask, logprobs, old_logprobs, advantages)
    ratio = bounded_exp(logprobs - old_logprobs)
    losses = -torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if importance_weights is not None:
        (importance_weights,) = _zero_masked(mask, importance_weights)
        losses = losses * importance_weights
    loss = aggregate(losses, mask, aggregation)

    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    metrics: Metrics = {
        "loss/policy": _mean(loss, _count(mask, aggregation)),
        "clip_fraction": _mean((clipped & mask).sum(), mask.sum()),
    }
    if mask.any():
        metrics["ratio/max"] = Max(ratio.detach()[mask].max().item())
    if importance_weights is not None:
        metrics["importance_weight/mean"] = _mean(importance_weights.sum(), mask.sum())
    return loss, metrics


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> tuple[Tensor, Metrics]:
    """Sum over tokens of ½·(V − return)²; with `clip`, the larger of that and the same for V kept within ±clip of V_old.

    All tensors [B, S]. The clip follows PPO's reference implementation (Schulman et al. 2017; it is not in the paper).
    Metrics: `loss/value`; `value_clip_fraction`, the share of tokens whose gradient the clip has cut.
    """
    values, old_values, returns = _zero_masked(mask, values, old_values, returns)
    squares = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        kept_near = old_values + (values - old_values).clamp(-clip, clip)
        kept_near_squares = (kept_near - returns).square()
        clipped = kept_near_squares > squares
        squares = torch.max(squares, kept_near_squares)
    loss = 0.5 * aggregate(squares, mask, "token_mean")
    tokens = mask.sum()
    return loss, {"loss/value": _mean(loss, tokens), "value_clip_fraction": _mean((clipped & mask).sum(), tokens)}


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimates of KL(π ‖ π_ref) from tokens sampled from π (Schulman 2020, "Approximating KL divergence").

    With d = log π − log π_ref: k1 = d; k2 = d²/2; k3 = e^(−d) − 1 + d. Shapes are kept. Finite, with finite gradient, at any
    finite d: the exponential of k3 goes on along its tangent beyond `LOG_RATIO_LIMIT`.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return bounded_exp(-difference) - 1 + difference


def kl_loss(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, estimator: KLEstimator, aggregation: Aggregation
) -> tuple[Tensor, Metrics]:
    """Sum of `kl_estimate` over tokens or sequences; the caller multiplies by its coefficient. All tensors [B, S].

    Note the gradients: that of k2 is the gradient of KL(π ‖ π_ref) in expectation; that of k1 is 0 in expectation; that
    of k3 is the gradient of KL(π_ref ‖ π). Metrics: `kl`, the estimate's mean over tokens.
    """
    logprobs, reference_logprobs = _zero_masked(mask, logprobs, reference_logprobs)
    estimates = kl_estimate(logprobs, reference_logprobs, estimator)
    return aggregate(estimates, mask, aggregation), {"kl": _mean(estimates.masked_fill(~mask, 0).sum(), mask.sum())}


def entropy_bonus(entropy: Tensor, mask: Tensor, aggregation: Aggregation) -> tuple[Tensor, Metrics]:
    """Sum of the entropy [B, S] (nats) over tokens or sequences: a bonus, so the caller *subtracts* coefficient × sum.

    Metrics: `entropy`, the mean over tokens.
    """
    (entropy,) = _zero_masked(mask, entropy)
    return aggregate(entropy, mask, aggregation), {"entropy": _mean(entropy.sum(), mask.sum())}


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(exp(old − rollout log-prob), cap) per token, without gradient, 0 where masked. All tensors [B, S].

    Corrects for tokens sampled by another policy than the one the ratio is taken against: an older version (staleness),
    or the engine's arithmetic. Truncated importance sampling: bias in exchange for bounded variance (Ionides 2008).
    """
    old_logprobs, rollout_logprobs = _zero_masked(mask, old_logprobs.detach(), rollout_logprobs.detach())
    return torch.exp(old_logprobs - rollout_logprobs).clamp(max=cap).masked_fill(~mask, 0)


def _zero_masked(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.masked_fill(~mask, 0) for tensor in tensors]


def _count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    return mask.sum() if aggregation == "token_mean" else mask.any(1).sum()


def _mean(total: Tensor, count: Tensor) -> Mean:
    return Mean(total.item(), count.item())
