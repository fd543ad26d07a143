"""Losses of reward models: of pairs of whole completions, and of single steps.

They are never summed or divided: the caller sums, and divides once by the number of pairs, or of steps, of the whole update.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from conveyor.algorithms.pair_losses import logistic_losses


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, label_smoothing: float = 0.0, centre_coef: float = 0.0
) -> Tensor:
    """−log σ(r_w − r_l − m) + c·(r_w + r_l)², of scores chosen and rejected float32 [B] → [B] (Ouyang et al. 2022, InstructGPT, eq. 1).

    Args:
        margins: m, float [B]: by how much the chosen one is better (Touvron et al. 2023, Llama 2, eq. 2); None: 0.
        label_smoothing: the share of pairs whose labels are taken for wrong, as in cDPO (Mitchell 2023).
        centre_coef: c: keeps scores near 0, which pairs alone leave open (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    differences = chosen - rejected
    if margins is not None:
        differences = differences - margins
    losses = logistic_losses(differences, label_smoothing)
    return losses + centre_coef * (chosen + rejected).square() if centre_coef else losses


def step_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """−y·log σ(s) − (1 − y)·log σ(−s) of each of K steps: scores float32 [K], labels float [K] in [0, 1] → [K].

    Lightman et al. 2023, "Let's verify step by step", §2.6; a label between 0 and 1 is the estimated probability that the step is right.
    """
    return binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")
