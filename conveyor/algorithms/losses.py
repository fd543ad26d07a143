"""Losses on sampled tokens, and what they are made of: pure functions of tensors.

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

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config.sections import Aggregation

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
    """[B, S] → scalar, still to be divided by the caller, who alone knows the whole update:

    `token_mean`: sum over tokens; by the number of tokens.
    `sequence_mean`: sum over sequences of each one's mean over its tokens; by the number of sequences with a token in the loss.
    `constant`: sum over tokens; by samples × max_response_length, so a token weighs the same in every update (Liu et al. 2025, Dr. GRPO).
    """
    values = values.masked_fill(~mask, 0)
    if aggregation == "sequence_mean":
        return (values.sum(1) / mask.sum(1).clamp(min=1)).sum()
    return values.sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> tuple[Tensor, Metrics]:
    """Sum over tokens of ½·(V − return)²; with `clip`, the larger of that and the same for V kept within ±clip of V_old.

    All tensors [B, S]. The clip follows PPO's reference implementation (Schulman et al. 2017; it is not in the paper).
    Metrics: `loss/value`; `value_clip_fraction`, the share of tokens whose gradient the clip has cut.
    """
    values, old_values, returns = zero_masked(mask, values, old_values, returns)
    squares = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        kept_near = old_values + (values - old_values).clamp(-clip, clip)
        kept_near_squares = (kept_near - returns).square()
        clipped = kept_near_squares > squares
        squares = torch.max(squares, kept_near_squares)
    loss = 0.5 * aggregate(squares, mask, "token_mean")
    tokens = mask.sum()
    return loss, {"loss/value": mean_of(loss, tokens), "value_clip_fraction": mean_of((clipped & mask).sum(), tokens)}


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
    logprobs, reference_logprobs = zero_masked(mask, logprobs, reference_logprobs)
    estimates = kl_estimate(logprobs, reference_logprobs, estimator)
    return aggregate(estimates, mask, aggregation), {"kl": mean_of(estimates.masked_fill(~mask, 0).sum(), mask.sum())}


def entropy_bonus(entropy: Tensor, mask: Tensor, aggregation: Aggregation) -> tuple[Tensor, Metrics]:
    """Sum of the entropy [B, S] (nats) over tokens or sequences: a bonus, so the caller *subtracts* coefficient × sum.

    Metrics: `entropy`, the mean over tokens.
    """
    (entropy,) = zero_masked(mask, entropy)
    return aggregate(entropy, mask, aggregation), {"entropy": mean_of(entropy.sum(), mask.sum())}


def zero_masked(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The tensors [B, S] with 0 at masked places: the first thing every loss does."""
    return [tensor.masked_fill(~mask, 0) for tensor in tensors]


def terms(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """How many things the metric of an aggregated loss is a mean over: tokens, or sequences with a token in the loss."""
    return mask.any(1).sum() if aggregation == "sequence_mean" else mask.sum()


def mean_of(total: Tensor, count: Tensor) -> Mean:
    return Mean(total.item(), count.item())
