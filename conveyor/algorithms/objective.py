"""What the actor minimises, put together from `losses.py`: pure functions of one batch's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conveyor.algorithms.losses import entropy_bonus, importance_weights, kl_loss, policy_loss
from conveyor.algorithms.metrics import Max, Metrics
from conveyor.config import sections
from conveyor.types import TrainBatch


@dataclass(frozen=True, slots=True)
class ActorLosses:
    """Sums, of tokens or sequences; what is minimised is `policy` + `other`."""

    policy: Tensor
    other: Tensor
    """KL to the reference and entropy bonus, with their coefficients; without both a constant 0."""
    metrics: Metrics


def actor_losses(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, advantages: Tensor, algorithm: sections.Algorithm, cap: float | None
) -> ActorLosses:
    """The actor's losses on a batch.

    Args:
        logprobs, entropy: float32 [B, S], of the model being trained.
        advantages: float32 [B, S].
        cap: of the truncated importance weights; None: no weights.
    """
    mask, aggregation = batch.loss_mask, algorithm.loss_aggregation
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    policy, metrics = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_low=algorithm.clip_ratio,
        clip_high=algorithm.clip_ratio_high or algorithm.clip_ratio,
        aggregation=aggregation,
        importance_weights=None if cap is None else importance_weights(old, batch.rollout_logprobs, mask, cap),
    )
    # How far the engine's log-probs are from the trainer's: rounding on-policy, drift with staleness.
    gap = (old - batch.rollout_logprobs).detach().masked_fill(~mask, 0).abs().amax()
    metrics["rollout_mismatch/max"] = Max(gap.item())
    other = torch.zeros((), device=logprobs.device)
    if batch.reference_logprobs is not None and algorithm.kl_in == "loss":
        kl, found = kl_loss(logprobs, batch.reference_logprobs, mask, estimator=algorithm.kl_estimator, aggregation=aggregation)
        other = other + algorithm.kl_coef * kl
        metrics["loss/kl"] = found["kl"]  # `kl` is the sampling policy's, over all tokens: the driver has it from the reports
    bonus, found = entropy_bonus(entropy, mask, aggregation)
    if algorithm.entropy_coef > 0:
        other = other - algorithm.entropy_coef * bonus
    return ActorLosses(policy, other, metrics | found)


def streaming_coefficients(mean: float, std: float) -> dict[str, float]:
    """Coefficients with which the gradients of the policy loss under the raw advantages (`advantages`) and under ones
    (`ones`), and of the other losses, add up to that under whitened advantages. Exact at ratio 1 only.

    Equal advantages (`std` 0) whiten to 0, as in `advantages.whiten`.
    """
    if std == 0:
        return {"other": 1.0}
    return {"advantages": 1 / std, "ones": -mean / std, "other": 1.0}
