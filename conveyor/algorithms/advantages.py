"""From rewards to advantages: pure functions of tensors and numbers.

Shapes: B samples, S response tokens. `mask` is bool [B, S], True for response tokens that exist; results are 0
where it is False, and what stands there in the inputs never matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from conveyor.algorithms.losses import kl_estimate
from conveyor.algorithms.metrics import Moments

GroupEstimator = Literal["group_norm", "dr_grpo", "rloo"]

GROUP_NORM_EPSILON = 1e-4
"""Added to the group's standard deviation, as TRL does."""


def place_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Puts each sample's score [B] on its last response token → float32 [B, S].

    Tokens [t, t, EOS, PAD, PAD] with score 1 give [0, 0, 1, 0, 0]. A sample without tokens keeps only zeros.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = places.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    return torch.where(mask & (places == last), scores[:, None].float(), 0.0)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """−kl_coef · (log π − log π_ref) per token (k1), without gradient: what is added to `place_rewards`. All [B, S].

    Ouyang et al. 2022, eq. 2, spread over the tokens. `logprobs` are those of the policy that sampled.
    """
    penalty = -kl_coef * kl_estimate(logprobs.detach(), reference_logprobs.detach(), "k1")
    return penalty.masked_fill(~mask, 0)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, eq. 16) → (advantages, returns), both float32 [B, S].

    values [B, S]: V of the state before each response token. A_t = δ_t + γλ·A_(t+1) with δ_t = r_t + γ·V_(t+1) − V_t;
    returns = A + V. The state after a response has value 0, whether the model ended it or the length limit did.
    Masked tokens do not exist: the tokens on both sides of one are neighbours.
    """
    rewards, values = (tensor.detach().float().masked_fill(~mask, 0) for tensor in (token_rewards, values))
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def group_advantages(outcomes: Sequence[float | None], estimator: GroupEstimator) -> list[float]:
    """One advantage for each sample of ONE group (the samples of a prompt) from their outcomes.

    `group_norm`: (r − mean) / (std + 1e-4), std with n − 1 (GRPO; Shao et al. 2024, §4.1.2; divisor and 1e-4 as in TRL)
    `dr_grpo`: r − mean (Liu et al. 2025)
    `rloo`: r − mean of the others (Ahmadian et al. 2024)
    An outcome of None belongs to a sample that no reward applies to: it is left out of mean and std, its own
    advantage is 0 and it must also stay out of the loss. Fewer than two outcomes, or equal ones, give 0 throughout.
    """
    known = [outcome for outcome in outcomes if outcome is not None]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(outcomes)
    mean = math.fsum(known) / len(known)
    if estimator == "group_norm":
        variance = math.fsum((outcome - mean) ** 2 for outcome in known) / (len(known) - 1)
        scale = 1 / (math.sqrt(variance) + GROUP_NORM_EPSILON)
    elif estimator == "rloo":
        scale = len(known) / (len(known) - 1)  # r − mean of the others = (r − mean) · n / (n − 1)
    else:
        scale = 1.0
    return [0.0 if outcome is None else (outcome - mean) * scale for outcome in outcomes]


def moments(advantages: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares (in float64) of the advantages [B, S] under the mask; they add up over micro-batches and ranks."""
    chosen = advantages.detach()[mask].double()
    return Moments(chosen.numel(), chosen.sum().item(), chosen.square().sum().item())


def whitening(moments: Moments) -> tuple[float, float]:
    """(mean, standard deviation with n − 1) of a whole update. The deviation is 0 for fewer than two values, and for values
    that are equal but for float32 rounding."""
    if moments.count < 2:
        return (moments.total if moments.count else 0.0), 0.0
    mean = moments.total / moments.count
    variance = (moments.squares - moments.total * mean) / (moments.count - 1)
    equal = variance <= (1e-6 * mean) ** 2
    return mean, 0.0 if equal else math.sqrt(variance)


def whiten(advantages: Tensor, mask: Tensor, mean: float, std: float) -> Tensor:
    """(A − mean) / std, [B, S]; all 0 where `std` is 0 (equal advantages tell nothing)."""
    if std == 0:
        return torch.zeros_like(advantages)
    return ((advantages - mean) / std).masked_fill(~mask, 0)
