"""Losses of single completions that are marked desirable or not: KTO, its APO-zero form, and BCO.

B completions; every loss is float32 [B], never summed or divided: the caller sums, and divides once by the number of completions of the
whole update. h = log π(y|x) − log π_ref(y|x), summed over the tokens of a completion; σ is the logistic function; w_d and w_u weigh the
desirable and the undesirable completions. What compares completions with the others of their update (KTO's z0) or of the run (BCO's δ) is
given, without gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def kto_losses(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d·(1 − σ(β·(h − z0))) for desirable completions, w_u·(1 − σ(β·(z0 − h))) for others (Ethayarajh et al. 2024, KTO, eq. 8).

    logprobs, reference_logprobs float32 [B]; desirable bool [B]; kl: z0 ≥ 0, a scalar (`kto_kl`), taken as a constant.
    """
    distance = logprobs - reference_logprobs - kl.detach()
    return _weights(desirable, desirable_weight, undesirable_weight) * torch.sigmoid(-beta * _signed(distance, desirable))


def apo_zero_unpaired_losses(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d·(1 − σ(β·h)) for desirable completions, w_u·σ(β·h) for others: KTO with z0 = 0 (D'Oosterlinck et al. 2024, APO, eq. 7)."""
    kl = logprobs.new_zeros(())
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto_losses(logprobs, reference_logprobs, desirable, kl=kl, beta=beta, **weights)


def kto_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """max(0, mean h) over an update's mismatched rows [N] (see `mismatched`): the estimate z0 of KL(π ‖ π_ref); a scalar, no gradient.

    Ethayarajh et al. 2024, §4.1. The mean is of the whole update: of one micro-batch it would be another loss.
    """
    return (logprobs - reference_logprobs).detach().mean().clamp(min=0)


def mismatched(prompts: Sequence[Hashable]) -> list[int]:
    """For each row of an update, the row whose completion its prompt is paired with to estimate the KL.

    The nearest row before it, counted in a circle, that has another prompt; where there is none, the row before. Never the row itself.
    ValueError: fewer than 2 rows.
    """
    rows = len(prompts)
    if rows < 2:
        raise ValueError(f"KTO's KL term pairs each prompt with another row's completion, but this update has {rows} row(s): it needs 2")
    if len(set(prompts)) == 1:
        return [(row - 1) % rows for row in range(rows)]
    partners: list[int] = []
    nearest = next(row for row in range(rows - 1, -1, -1) if prompts[row] != prompts[0])  # of row 0, backwards round the circle
    for row in range(rows):
        if prompts[row] != prompts[row - 1]:
            nearest = (row - 1) % rows
        partners.append(nearest)
    return partners


def bco_losses(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    *,
    delta: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """−w_d·log σ(r − δ) for desirable completions, −w_u·log σ(−(r − δ)) for others, r = β·h.

    Jung et al. 2024, BCO, arXiv 2404.04656, "reward shift"; the weights are KTO's.

    logprobs, reference_logprobs float32 [B]; desirable bool [B]; delta: `RewardShift.delta`.
    """
    distance = beta * (logprobs - reference_logprobs) - delta
    return -_weights(desirable, desirable_weight, undesirable_weight) * logsigmoid(_signed(distance, desirable))


@dataclass(frozen=True, slots=True)
class RewardShift:
    """BCO's δ = ½·(mean reward of desirable completions + mean reward of others), over all updates so far (Jung et al. 2024)."""

    desirable_total: float = 0.0
    desirable_count: float = 0.0
    undesirable_total: float = 0.0
    undesirable_count: float = 0.0

    @property
    def delta(self) -> float:
        """0 before the first update; the one mean there is where only one kind of row has come up."""
        sums = [(self.desirable_total, self.desirable_count), (self.undesirable_total, self.undesirable_count)]
        means = [total / count for total, count in sums if count]
        return sum(means) / len(means) if means else 0.0

    def updated(self, rewards_desirable: Tensor, rewards_undesirable: Tensor) -> RewardShift:
        """With the rewards β·h of a whole update, each [n], n may be 0."""
        return RewardShift(
            self.desirable_total + rewards_desirable.double().sum().item(),
            self.desirable_count + len(rewards_desirable),
            self.undesirable_total + rewards_undesirable.double().sum().item(),
            self.undesirable_count + len(rewards_undesirable),
        )

    def state(self) -> dict[str, float]:
        """For a checkpoint; `RewardShift(**state)` goes on from it."""
        return asdict(self)


def _signed(values: Tensor, desirable: Tensor) -> Tensor:
    return torch.where(desirable, values, -values)


def _weights(desirable: Tensor, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """[B]."""
    return torch.where(desirable, desirable_weight, undesirable_weight)
