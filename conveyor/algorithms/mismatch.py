"""The policy that sampled is not the one the ratio is taken against: an older version, or another arithmetic.

Both are seen as the gap log π_old − log π_rollout of each sampled token. Shapes and masks as in `losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conveyor.algorithms.losses import kl_estimate, mean_of, zero_masked
from conveyor.algorithms.metrics import Max, Metrics
from conveyor.config.sections import ImportanceCorrection


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float, correction: ImportanceCorrection = "token_truncate"
) -> Tensor:
    """Weights of the tokens' losses, float32 [B, S] without gradient, 0 where masked; all tensors [B, S].

    With w = exp(old − rollout log-prob) of a token, W = Π w over a sequence's tokens:
    `token_truncate`: min(w, cap), bias in exchange for bounded variance (Ionides 2008, truncated importance sampling)
    `token_mask`: w, or 0 where w > cap
    `sequence_truncate`, `sequence_mask`: the same of W, on every token of its sequence
    As TRL's `vllm_importance_sampling_mode` of these names.
    """
    return _cut(_ratios(old_logprobs, rollout_logprobs, mask, correction), mask, cap, correction)


def mismatch_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cap: float | None = None,
    correction: ImportanceCorrection = "token_truncate",
) -> Metrics:
    """How far the policy that sampled is from the one the ratio is against. All tensors [B, S].

    `rollout_mismatch/max`, `rollout_mismatch/mean`: of the tokens' |old − rollout log-prob|
    `rollout_mismatch/kl`: KL(π_rollout ‖ π_old) per token, from the sampled tokens (k3: never below 0)
    and with a cap, of the `importance_weights` with it: `importance_weight/mean`; `importance_weight/cut_fraction`, the share
    of tokens whose weight was beyond the cap.
    """
    old, rollout = zero_masked(mask, old_logprobs.detach(), rollout_logprobs.detach())
    gaps, tokens = (old - rollout).abs(), mask.sum()
    metrics: Metrics = {
        "rollout_mismatch/max": Max(gaps.amax().item()),
        "rollout_mismatch/mean": mean_of(gaps.sum(), tokens),
        "rollout_mismatch/kl": mean_of(kl_estimate(rollout, old, "k3").sum(), tokens),
    }
    if cap is not None:
        ratios = _ratios(old, rollout, mask, correction)
        metrics["importance_weight/mean"] = mean_of(_cut(ratios, mask, cap, correction).sum(), tokens)
        metrics["importance_weight/cut_fraction"] = mean_of(((ratios > cap) & mask).sum(), tokens)
    return metrics


def _ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: ImportanceCorrection) -> Tensor:
    """w or W of each token, infinite where it is beyond float32: it is cut in any case."""
    old_logprobs, rollout_logprobs = zero_masked(mask, old_logprobs.detach(), rollout_logprobs.detach())
    gaps = old_logprobs - rollout_logprobs
    if correction in ("sequence_truncate", "sequence_mask"):
        gaps = gaps.sum(1, keepdim=True).expand_as(gaps)
    return torch.exp(gaps)


def _cut(ratios: Tensor, mask: Tensor, cap: float, correction: ImportanceCorrection) -> Tensor:
    truncated = correction in ("token_truncate", "sequence_truncate")
    return (ratios.clamp(max=cap) if truncated else ratios.masked_fill(ratios > cap, 0)).masked_fill(~mask, 0)
