"""The loss of pairs of samples: a better and a worse answer to one prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from conveyor.algorithms.losses import mean_of, zero_masked
from conveyor.algorithms.metrics import Metrics
from conveyor.algorithms.pair_losses import ipo_losses, logistic_losses


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    signs: Tensor,
    groups: Tensor,
    *,
    beta: float,
    kind: Literal["sigmoid", "ipo"],
) -> tuple[Tensor, Metrics]:
    """Sum over pairs; the caller divides by their number.

    With h = log π(y)/π_ref(y), summed over the tokens of an answer, and the margin m = h(better) − h(worse):
    `sigmoid`: −log σ(β·m) (Rafailov et al. 2023, eq. 7)
    `ipo`: (m − 1/(2β))² (Azar et al. 2023, eq. 17, where β is called τ). h is a sum, as in the paper and TRL's online DPO
    trainer; TRL's offline one divides it by the number of tokens (`length_normalize` of `pair_losses.py`).

    Args:
        logprobs, reference_logprobs: float32 [B, S].
        signs: float [B]: 1 better, −1 worse, 0 neither.
        groups: int [B]: the samples of a prompt share a number. A group with one 1 and one −1, each with a token under the
            mask, is a pair; what else is there has no loss.

    Metrics: `loss/policy`; `dpo/accuracy`, the share of pairs with m > 0; `dpo/margin`, β·m.
    """
    logprobs, reference_logprobs = zero_masked(mask, logprobs, reference_logprobs)
    signs = signs.to(logprobs).masked_fill(~mask.any(1), 0)
    _, places = groups.unique(return_inverse=True)  # [B] → 0 … K − 1
    none = logprobs.new_zeros(len(signs))  # K ≤ B
    better, worse = (none.index_add(0, places, (signs == sign).to(none)) for sign in (1, -1))
    assert better.max() <= 1 and worse.max() <= 1, "one pair a group"
    margins = none.index_add(0, places, signs * (logprobs - reference_logprobs).sum(1))[(better + worse) == 2]
    losses = logistic_losses(beta * margins) if kind == "sigmoid" else ipo_losses(margins, beta)
    loss, pairs = losses.sum(), torch.tensor(len(margins))
    return loss, {
        "loss/policy": mean_of(loss, pairs),
        "dpo/accuracy": mean_of((margins > 0).sum(), pairs),
        "dpo/margin": mean_of(beta * margins.sum(), pairs),
    }
