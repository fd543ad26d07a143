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

from conveyor.algorithms.losses import KLEstimator, kl_estimate, zero_masked
from conveyor.algorithms.metrics import Moments

GroupEstimator = Literal["group_norm", "dr_grpo", "rloo", "opo", "best_worst"]

ROUNDING = 1e-6
"""Differences up to this, of numbers near 1 or relative to larger ones, are float32 rounding: the KL of a policy to a reference that
equals it is about 1e-7. An optimizer like Adam would make full steps of them."""
GROUP_NORM_EPSILON = 1e-4
"""Added to the group's standard deviation, as TRL does."""


def place_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Puts each sample's score [B] on its last response token → float32 [B, S].

    Tokens [t, t, EOS, PAD, PAD] with score 1 give [0, 0, 1, 0, 0]. A sample without tokens keeps only zeros.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = places.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    return torch.where(mask & (places == last), scores[:, None].float(), 0.0)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, kl_coef: float, estimator: KLEstimator = "k1") -> Tensor:
    """−kl_coef · `kl_estimate` per token, without gradient: what is added to `place_rewards`. All [B, S].

    With k1, −kl_coef · (log π − log π_ref): Ouyang et al. 2022, eq. 2, spread over the tokens. `logprobs` are those of the policy
    that sampled.
    """
    logprobs, reference_logprobs = zero_masked(mask, logprobs.detach(), reference_logprobs.detach())
    return -kl_coef * kl_estimate(logprobs, reference_logprobs, estimator)


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = Σ_(u ≥ t) γ^(u−t)·r_u, float32 [B, S]. Masked tokens do not exist, as in `gae`.

    With a baseline taken off, the advantages of REINFORCE (Williams 1992; none), REINFORCE++ (Hu 2025; none, whitened over the update),
    its baseline variant and ReMax (`group_baselines`). With γ = 0 and the KL in the reward, those of on-policy distillation:
    A_t = −kl_coef · (log π − log π_teacher), whose policy gradient is that of the KL to the teacher token by token.
    """
    (rewards,) = zero_masked(mask, token_rewards.detach().float())
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(mask[:, t], following, 0.0)
    return returns


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


def group_advantages(outcomes: Sequence[float | None], estimator: GroupEstimator, lengths: Sequence[int] | None = None) -> list[float]:
    """One advantage for each sample of ONE group (the samples of a prompt) from their outcomes r.

    `group_norm`: (r − mean) / (std + 1e-4), std with n − 1 (GRPO; Shao et al. 2024, §4.1.2; divisor and 1e-4 as in TRL)
    `dr_grpo`: r − mean (Liu et al. 2025)
    `rloo`: r − mean of the others (Ahmadian et al. 2024)
    `opo`: r − Σ l·r / Σ l, with l the sampled tokens of each sample, `lengths` (Hao et al. 2025, the length-weighted baseline)
    `best_worst`: 1 for the first of the best, −1 for the first of the worst, 0 for the others (the pair of online DPO; Guo et al. 2024)
    An outcome of None belongs to a sample that no reward applies to: it is left out of every mean, its own
    advantage is 0 and it must also stay out of the loss. Fewer than two outcomes, or ones that are equal but for the rounding
    of a KL in them, give 0 throughout.
    """
    known = [outcome for outcome in outcomes if outcome is not None]
    if len(known) < 2 or max(known) - min(known) <= ROUNDING * max(1.0, abs(max(known))):
        return [0.0] * len(outcomes)
    if estimator == "best_worst":
        best, worst = outcomes.index(max(known)), outcomes.index(min(known))
        return [float(i == best) - float(i == worst) for i in range(len(outcomes))]
    baseline = _weighted_mean(outcomes, lengths) if estimator == "opo" else math.fsum(known) / len(known)
    advantages = [0.0 if outcome is None else outcome - baseline for outcome in outcomes]
    if estimator == "group_norm":
        return normalize_group(advantages, outcomes)
    if estimator == "rloo":
        scale = len(known) / (len(known) - 1)  # r − mean of the others = (r − mean) · n / (n − 1)
        return [advantage * scale for advantage in advantages]
    return advantages


def _weighted_mean(outcomes: Sequence[float | None], lengths: Sequence[int] | None) -> float:
    assert lengths is not None, "opo weighs outcomes with lengths"
    pairs = [(length, outcome) for length, outcome in zip(lengths, outcomes, strict=True) if outcome is not None]
    return math.fsum(length * outcome for length, outcome in pairs) / max(1, sum(length for length, _ in pairs))


def normalize_group(advantages: Sequence[float], outcomes: Sequence[float | None]) -> list[float]:
    """(A − mean) / (std + 1e-4), std with n − 1, over the samples of ONE group whose outcome is known; 0 for the others.

    `dr_grpo` normalised is `group_norm`. Fewer than two known outcomes give 0 throughout.
    """
    known = [advantage for advantage, outcome in zip(advantages, outcomes, strict=True) if outcome is not None]
    if len(known) < 2:
        return [0.0] * len(outcomes)
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((advantage - mean) ** 2 for advantage in known) / (len(known) - 1))
    scale = 1 / (std + GROUP_NORM_EPSILON)
    return [0.0 if outcome is None else (a - mean) * scale for a, outcome in zip(advantages, outcomes, strict=True)]


def group_baselines(scores: Sequence[float | None], estimator: Literal["reinforce_pp_baseline", "remax"]) -> list[float]:
    """What is taken off the returns of each sample of ONE group.

    `reinforce_pp_baseline`: the mean of the known scores (Hu 2025; then whitened over the update)
    `remax`: the score of the last sample, the greedy one (Li et al. 2023, ReMax)
    Without a known score to go by the baseline is 0: any number that does not depend on the sample leaves the gradient's
    expectation as it is.
    """
    known = [score for score in scores if score is not None]
    if estimator == "remax":
        baseline = scores[-1] if scores else None
    elif known and min(known) == max(known):
        baseline = known[0]  # exactly, so that equal scores give exactly 0
    else:
        baseline = math.fsum(known) / len(known) if known else None
    return [baseline or 0.0] * len(scores)


def moments(advantages: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares (in float64) of the advantages [B, S] under the mask; they add up over micro-batches and ranks."""
    chosen = advantages.detach()[mask].double()
    return Moments(chosen.numel(), chosen.sum().item(), chosen.square().sum().item())


def sample_moments(values: Tensor, mask: Tensor) -> list[Moments]:
    """`moments` of each row of values [B, S], for values that each sample's own baseline is still to be taken off (`Moments.shifted`)."""
    return [moments(row, kept) for row, kept in zip(values, mask, strict=True)]


def whitening(moments: Moments) -> tuple[float, float]:
    """(mean, standard deviation with n − 1) of a whole update. The deviation is 0 for fewer than two values, and for values
    that are equal but for float32 rounding: of themselves, of what was taken off them, or of log-probs (`ROUNDING`)."""
    if moments.count < 2:
        return (moments.total if moments.count else 0.0), 0.0
    mean = moments.total / moments.count
    variance = (moments.squares - moments.total * mean) / (moments.count - 1)
    rounding = ROUNDING**2 * max(1.0, mean**2, moments.unshifted / moments.count)
    return mean, 0.0 if variance <= rounding else math.sqrt(variance)


def whiten(advantages: Tensor, mask: Tensor, mean: float, std: float) -> Tensor:
    """(A − mean) / std, [B, S]; all 0 where `std` is 0 (equal advantages tell nothing)."""
    if std == 0:
        return torch.zeros_like(advantages)
    return ((advantages - mean) / std).masked_fill(~mask, 0)
