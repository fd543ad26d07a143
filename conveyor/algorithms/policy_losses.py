"""What advantages are multiplied with: one small function a loss, chosen by `algorithm.policy_loss`.

Shapes and masks as in `losses.py`. A = advantage, π = the policy being trained, π_old = the one the update started
from, r = π/π_old, ε_low and ε_high = `clip_ratio` and `clip_ratio_high`. Below, every loss is that of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from conveyor.algorithms.losses import aggregate, bounded_exp, mean_of, terms, zero_masked
from conveyor.algorithms.metrics import Max, Metrics
from conveyor.config.sections import Aggregation, PolicyLoss


class _Tokens(NamedTuple):
    """float32 [B, S], 0 where masked; mask bool [B, S]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


class _Clip(NamedTuple):
    low: float
    high: float
    dual: float | None

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)


class _Terms(NamedTuple):
    """All [B, S]."""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor
    """bool: the clip has had an effect on the token's gradient."""


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
    kind: PolicyLoss = "ppo_clip",
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The policy loss of a batch, by `kind`: see the functions of these names in this file (`dpo` is in preferences.py).

    All tensors [B, S]. `importance_weights` (mismatch.py) multiply each token's loss. `dual_clip` is for `ppo_clip` only.
    Metrics: `loss/policy`; `clip_fraction`, the share of tokens whose gradient the clip has cut off (`cispo`: cut down);
    `ratio/max`, of the tokens' ratios or, `gspo`, the sequences'.
    """
    assert kind in _LOSSES, f"{kind} is no loss of single samples"
    assert dual_clip is None or kind == "ppo_clip"
    logprobs, old_logprobs, advantages = zero_masked(mask, logprobs, old_logprobs, advantages)
    losses, ratio, clipped = _LOSSES[kind](_Tokens(logprobs, old_logprobs, advantages, mask), _Clip(clip_low, clip_high, dual_clip))
    if importance_weights is not None:
        (importance_weights,) = zero_masked(mask, importance_weights)
        losses = losses * importance_weights
    loss = aggregate(losses, mask, aggregation)
    metrics: Metrics = {
        "loss/policy": mean_of(loss, terms(mask, aggregation)),
        "clip_fraction": mean_of((clipped & mask).sum(), mask.sum()),
    }
    if mask.any():
        metrics["ratio/max"] = Max(ratio.detach()[mask].max().item())
    return loss, metrics


def ppo_clip(tokens: _Tokens, clip: _Clip) -> _Terms:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) (Schulman et al. 2017, eq. 7; two bounds: Yu et al. 2025, DAPO, §3.1).

    With dual clip c, where A < 0: −max(min(…), c·A), so that one token costs c·|A| at most (Ye et al. 2020, dual-clip PPO).
    """
    ratio = bounded_exp(tokens.logprobs - tokens.old_logprobs)
    return _clipped_surrogate(ratio, tokens.advantages, clip)


def gspo(tokens: _Tokens, clip: _Clip) -> _Terms:
    """The clipped surrogate of `ppo_clip` with one ratio for a sequence, s = (π(y)/π_old(y))^(1/|y|), on each of its tokens.

    Zheng et al. 2025 (GSPO), eqs. 5 and 7. Averaged over tokens and then sequences (`sequence_mean`) it is the paper's loss.
    """
    log_ratios = tokens.logprobs - tokens.old_logprobs  # 0 where masked
    means = log_ratios.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
    return _clipped_surrogate(bounded_exp(means).expand_as(log_ratios), tokens.advantages, clip)


def cispo(tokens: _Tokens, clip: _Clip) -> _Terms:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log π: the ratio is clipped as a weight, so no token loses its gradient.

    sg: no gradient goes through. MiniMax 2025 (MiniMax-M1), eqs. 4 and 5.
    """
    ratio = bounded_exp(tokens.logprobs - tokens.old_logprobs).detach()
    weight = clip(ratio)
    return _Terms(-weight * tokens.advantages * tokens.logprobs, ratio, weight != ratio)


def policy_gradient(tokens: _Tokens, clip: _Clip) -> _Terms:
    """−A·log π, without ratio or clip (Williams 1992)."""
    ratio = bounded_exp(tokens.logprobs - tokens.old_logprobs).detach()
    return _Terms(-tokens.advantages * tokens.logprobs, ratio, torch.zeros_like(tokens.mask))


_LOSSES: dict[PolicyLoss, Callable[[_Tokens, _Clip], _Terms]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: _Clip) -> _Terms:
    gains = torch.min(ratio * advantages, clip(ratio) * advantages)
    clipped = ((ratio > 1 + clip.high) & (advantages > 0)) | ((ratio < 1 - clip.low) & (advantages < 0))
    if clip.dual is not None:
        gains = torch.where(advantages < 0, torch.max(gains, clip.dual * advantages), gains)
        clipped = clipped | ((ratio > clip.dual) & (advantages < 0))
    return _Terms(-gains, ratio, clipped)
