"""What the actor minimises, put together from the losses of this package: pure functions of one batch's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conveyor.algorithms.losses import entropy_bonus, kl_loss
from conveyor.algorithms.metrics import Metrics
from conveyor.algorithms.mismatch import importance_weights, mismatch_metrics
from conveyor.algorithms.policy_losses import policy_loss
from conveyor.algorithms.preferences import dpo_loss
from conveyor.config import sections
from conveyor.types import TrainBatch


@dataclass(frozen=True, slots=True)
class ActorLosses:
    """Sums, of tokens, sequences or pairs; what is minimised is `policy` + `other`."""

    policy: Tensor
    other: Tensor
    """KL to the reference and entropy bonus, with their coefficients; without both a constant 0."""
    metrics: Metrics


def actor_losses(
    logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    advantages: Tensor,
    algorithm: sections.Algorithm,
    cap: float | None,
    kl_coef: float | None = None,
) -> ActorLosses:
    """The actor's losses on a batch.

    Args:
        logprobs, entropy: float32 [B, S], of the model being trained.
        advantages: float32 [B, S].
        cap: of the importance weights; None: no weights.
        kl_coef: of the KL in the loss, as the adaptive controller has it now; None: the recipe's.
    """
    mask, aggregation, correction = batch.loss_mask, algorithm.loss_aggregation, algorithm.importance_correction
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    policy, metrics = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_low=algorithm.clip_ratio,
        clip_high=algorithm.clip_ratio_high or algorithm.clip_ratio,
        aggregation=aggregation,
        importance_weights=None if cap is None else importance_weights(old, batch.rollout_logprobs, mask, cap, correction),
        kind=algorithm.policy_loss,
        dual_clip=algorithm.dual_clip,
    )
    metrics |= mismatch_metrics(old, batch.rollout_logprobs, mask, cap, correction)
    other = torch.zeros((), device=logprobs.device)
    if batch.reference_logprobs is not None and algorithm.kl_in == "loss":
        kl, found = kl_loss(logprobs, batch.reference_logprobs, mask, estimator=algorithm.kl_estimator, aggregation=aggregation)
        other = other + (algorithm.kl_coef if kl_coef is None else kl_coef) * kl
        metrics["loss/kl"] = found["kl"]  # `kl` is the sampling policy's, over all tokens: the driver has it from the reports
    bonus, found = entropy_bonus(entropy, mask, aggregation)
    if algorithm.entropy_coef > 0:
        other = other - algorithm.entropy_coef * bonus
    return ActorLosses(policy, other, metrics | found)


def pair_losses(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, signs: Tensor, groups: Tensor, algorithm: sections.Algorithm
) -> ActorLosses:
    """The actor's loss on pairs of samples (`policy_loss: dpo`): a sum over the batch's pairs, which `dpo_loss` finds.

    Args:
        logprobs, entropy: float32 [B, S], of the model being trained.
        signs, groups: [B], see `dpo_loss`.
    """
    assert batch.reference_logprobs is not None, "the dpo loss is relative to a reference"
    mask = batch.loss_mask
    policy, metrics = dpo_loss(logprobs, batch.reference_logprobs, mask, signs, groups, beta=algorithm.dpo_beta, kind=algorithm.dpo_loss)
    metrics |= mismatch_metrics(logprobs, batch.rollout_logprobs, mask)
    _, found = entropy_bonus(entropy, mask, algorithm.loss_aggregation)
    return ActorLosses(policy, torch.zeros((), device=logprobs.device), metrics | found)


def streaming_coefficients(mean: float, std: float) -> dict[str, float]:
    """Coefficients with which the gradients of the policy loss under the raw advantages (`advantages`) and under ones
    (`ones`), and of the other losses, add up to that under whitened advantages. Exact at ratio 1 only.

    Equal advantages (`std` 0) whiten to 0, as in `advantages.whiten`.
    """
    if std == 0:
        return {"other": 1.0}
    return {"advantages": 1 / std, "ones": -mean / std, "other": 1.0}
