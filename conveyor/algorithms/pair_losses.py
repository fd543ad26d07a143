"""Losses of preference pairs from a fixed dataset: one small function a loss, chosen by name.

B pairs; every loss is float32 [B], never summed or divided: the caller sums, and divides once by the number of pairs of the whole update.
In the formulas π is the policy, w the chosen completion and l the rejected one, h = log π(y|x) − log π_ref(y|x) its log-ratio (for
`REFERENCE_FREE` losses log π(y|x) alone), Δ = h_w − h_l, ε = label smoothing and σ the logistic function. Log-probs are summed over the
tokens of the completion; with `length_normalize` they are divided by their number first.

Losses and gradients are finite wherever their formulas are, at log-ratios of ±10⁴ too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from conveyor.algorithms.losses import mean_of
from conveyor.algorithms.metrics import Metrics
from conveyor.config.offline import REFERENCE_FREE, PairLoss

LENGTH_AVERAGED = ("simpo", "orpo")
"""They divide by the number of tokens by definition."""

QUANTILES = ("aot", "aot_unpaired")
"""They compare the pairs of a whole update: they need `matched`."""


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Pairs as the losses see them; all [B]."""

    chosen: Tensor
    """float32: log π of the completion, summed over its tokens; `rejected`, and those of the reference, likewise."""
    rejected: Tensor
    reference_chosen: Tensor | None
    """None where there is no reference."""
    reference_rejected: Tensor | None
    chosen_tokens: Tensor
    """Number of the completion's tokens."""
    rejected_tokens: Tensor


class _Pair(NamedTuple):
    """What one loss may read; tensors [B]."""

    chosen: Tensor
    """h_w."""
    rejected: Tensor
    """h_l."""
    beta: float
    smoothing: float
    margin: float
    tau: float
    matched: Tensor | None

    @property
    def delta(self) -> Tensor:
        return self.chosen - self.rejected


def pair_losses(
    kind: PairLoss,
    pairs: PairLogprobs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    length_normalize: bool = False,
    discopop_tau: float = 0.05,
    matched: Tensor | None = None,
) -> Tensor:
    """The loss of each pair, float32 [B]: see the functions of these names in this file.

    Args:
        beta: the strength of the tie to the reference; the scale of the reward (simpo), the weight of the odds ratio (orpo: λ).
        label_smoothing: the share of pairs whose labels are taken for wrong, in [0, 0.5); the losses below that have no ε leave it out.
        margin: γ of simpo, δ of slic.
        length_normalize: makes `sigmoid` and `ipo` what TRL calls sigmoid_norm and ipo. `LENGTH_AVERAGED` losses always do.
        matched: this micro-batch's rows of `aot_matched`, for `QUANTILES` losses.

    ValueError: a label smoothing that the loss cannot have.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and less than 0.5, not {label_smoothing}")
    if kind == "exo_pair" and not label_smoothing:
        raise ValueError("the exo_pair loss is infinite without label smoothing: set it above 0, e.g. to 0.001")
    assert (matched is not None) == (kind in QUANTILES), "aot_matched goes with the aot losses"
    chosen, rejected = log_ratios(kind, pairs, length_normalize)
    return _LOSSES[kind](_Pair(chosen, rejected, beta, label_smoothing, margin, discopop_tau, matched))


def log_ratios(kind: PairLoss, pairs: PairLogprobs, length_normalize: bool) -> tuple[Tensor, Tensor]:
    """(h_w, h_l), each [B], as the loss compares them. aot's are of the policy alone: its reference is in `aot_matched`."""
    chosen, rejected = pairs.chosen, pairs.rejected
    if kind != "aot" and kind not in REFERENCE_FREE:
        reference_chosen, reference_rejected = _reference(pairs)
        chosen, rejected = chosen - reference_chosen, rejected - reference_rejected
    if length_normalize or kind in LENGTH_AVERAGED:
        return _per_token(chosen, rejected, pairs)
    return chosen, rejected


def pair_metrics(kind: PairLoss, pairs: PairLogprobs, *, beta: float, length_normalize: bool = False) -> Metrics:
    """Means over the pairs of the implicit rewards β·h: `rewards/chosen`, `rewards/rejected`, `rewards/margin` (their difference),
    `rewards/accuracy` (the share of pairs where the chosen one's is larger).

    h is what the loss compares: an average over tokens where the loss has one, without the reference where it has none.
    """
    if kind == "aot":  # its h leaves the reference to `matched`
        kind = "sigmoid"
    chosen, rejected = (beta * h.detach() for h in log_ratios(kind, pairs, length_normalize))
    number = torch.tensor(len(chosen))
    return {
        "rewards/chosen": mean_of(chosen.sum(), number),
        "rewards/rejected": mean_of(rejected.sum(), number),
        "rewards/margin": mean_of((chosen - rejected).sum(), number),
        "rewards/accuracy": mean_of((chosen > rejected).sum(), number),
    }


def logistic_losses(scores: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """−(1 − ε)·log σ(score) − ε·log σ(−score); any shape (Mitchell 2023, "A note on DPO with noisy preferences", cDPO)."""
    if not label_smoothing:
        return -logsigmoid(scores)
    return -(1 - label_smoothing) * logsigmoid(scores) - label_smoothing * logsigmoid(-scores)


def ipo_losses(margins: Tensor, beta: float) -> Tensor:
    """(Δ − 1/(2β))² (Azar et al. 2023, eq. 17, where β is called τ); any shape."""
    return (margins - 1 / (2 * beta)).square()


def _sigmoid(pair: _Pair) -> Tensor:
    """−log σ(β·Δ), smoothed as in cDPO (Rafailov et al. 2023, eq. 7). It is also RSO's sigmoid-norm, with γ for β (Liu et al. 2023,
    arXiv 2309.06657)."""
    return logistic_losses(pair.beta * pair.delta, pair.smoothing)


def _ipo(pair: _Pair) -> Tensor:
    return ipo_losses(pair.delta, pair.beta)


def _hinge(pair: _Pair) -> Tensor:
    """max(0, 1 − β·Δ): RSO's hinge-norm, with γ for β (Liu et al. 2023, arXiv 2309.06657)."""
    return torch.relu(1 - pair.beta * pair.delta)


def _robust(pair: _Pair) -> Tensor:
    """(−(1 − ε)·log σ(β·Δ) + ε·log σ(−β·Δ)) / (1 − 2ε): unbiased if a share ε of labels is flipped (Chowdhury et al. 2024, rDPO).

    The same as −log σ(β·Δ) − ε/(1 − 2ε)·β·Δ, for log σ(x) − log σ(−x) = x, and without the difference of large numbers.
    """
    scores = pair.beta * pair.delta
    return -logsigmoid(scores) - pair.smoothing / (1 - 2 * pair.smoothing) * scores


def _exo_pair(pair: _Pair) -> Tensor:
    """KL((σ(β·Δ), σ(−β·Δ)) ‖ (1 − ε, ε)) (Ji et al. 2024, EXO, eq. 16)."""
    scores = pair.beta * pair.delta
    chosen = torch.sigmoid(scores) * (logsigmoid(scores) - math.log1p(-pair.smoothing))
    return chosen + torch.sigmoid(-scores) * (logsigmoid(-scores) - math.log(pair.smoothing))


def _nca_pair(pair: _Pair) -> Tensor:
    """−log σ(β·h_w) − ½·log σ(−β·h_w) − ½·log σ(−β·h_l) (Chen et al. 2024, NCA)."""
    chosen, rejected = pair.beta * pair.chosen, pair.beta * pair.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pair: _Pair) -> Tensor:
    """−log σ(β·h_w) − log σ(−β·h_l): BCO's classifier without a shift (Jung et al. 2024)."""
    return -logsigmoid(pair.beta * pair.chosen) - logsigmoid(-pair.beta * pair.rejected)


def _sppo_hard(pair: _Pair) -> Tensor:
    """(h_w − 1/(2β))² + (h_l + 1/(2β))² (Wu et al. 2024, SPPO, eq. 4.7 with probabilities 1 and 0)."""
    target = 1 / (2 * pair.beta)
    return (pair.chosen - target).square() + (pair.rejected + target).square()


def _aot(pair: _Pair) -> Tensor:
    """Logistic loss of β·(log π_w − log π_l − the reference's difference of equal rank) (Melnyk et al. 2024, AOT)."""
    assert pair.matched is not None
    return logistic_losses(pair.beta * (pair.delta - pair.matched), pair.smoothing)


def _aot_unpaired(pair: _Pair) -> Tensor:
    """Logistic loss of β·(h_w − h_l of equal rank), once for each chosen and once for each rejected one (Melnyk et al. 2024).

    Summed over the update the two sides are the same terms. Each carries the gradient of its own h, since its partner is a constant here:
    both gradients count in full, both values by half.
    """
    assert pair.matched is not None
    chosen = logistic_losses(pair.beta * (pair.chosen - pair.matched[:, 0]), pair.smoothing)
    rejected = logistic_losses(pair.beta * (pair.matched[:, 1] - pair.rejected), pair.smoothing)
    both = chosen + rejected
    return both - 0.5 * both.detach()


def _apo_zero(pair: _Pair) -> Tensor:
    """σ(−β·h_w) + σ(β·h_l) (D'Oosterlinck et al. 2024, APO, eq. 7): for chosen completions better than the policy's own."""
    return torch.sigmoid(-pair.beta * pair.chosen) + torch.sigmoid(pair.beta * pair.rejected)


def _apo_down(pair: _Pair) -> Tensor:
    """σ(β·h_w) + σ(−β·Δ) (D'Oosterlinck et al. 2024, APO, eq. 8): for chosen completions worse than the policy's own."""
    return torch.sigmoid(pair.beta * pair.chosen) + torch.sigmoid(-pair.beta * pair.delta)


def _discopop(pair: _Pair) -> Tensor:
    """With x = β·Δ and m = σ(x/τ): −(1 − m)·log σ(x) + m·exp(−x) (Lu et al. 2024, DiscoPOP, eq. 5).

    The product of m and the exponential is one exponential: 0, not 0·∞, for a pair far on the wrong side (τ < 1).
    """
    scores = pair.beta * pair.delta
    return -torch.sigmoid(-scores / pair.tau) * logsigmoid(scores) + torch.exp(logsigmoid(scores / pair.tau) - scores)


def _simpo(pair: _Pair) -> Tensor:
    """−log σ(β·Δ − γ), Δ of averages over tokens (Meng et al. 2024, SimPO, eq. 6), smoothed as in cDPO."""
    return logistic_losses(pair.beta * pair.delta - pair.margin, pair.smoothing)


def _orpo(pair: _Pair) -> Tensor:
    """−β·log σ(log odds_w − log odds_l), odds = p/(1 − p), log p = the average over tokens (Hong et al. 2024, ORPO, eq. 7; β is λ).

    A p that float32 cannot tell from 1 counts as the next smaller number, so that its odds are finite.
    """
    odds = [h - torch.log(-torch.expm1(h)) for h in (side.clamp(max=-torch.finfo(side.dtype).eps) for side in (pair.chosen, pair.rejected))]
    return -pair.beta * logsigmoid(odds[0] - odds[1])


def _cpo(pair: _Pair) -> Tensor:
    """−log σ(β·(log π_w − log π_l)) (Xu et al. 2024, CPO, eq. 3), smoothed as in cDPO."""
    return logistic_losses(pair.beta * pair.delta, pair.smoothing)


def _slic(pair: _Pair) -> Tensor:
    """max(0, δ − (log π_w − log π_l)) (Zhao et al. 2023, SLiC-HF, eq. 1)."""
    return torch.relu(pair.margin - pair.delta)


_LOSSES: dict[PairLoss, Callable[[_Pair], Tensor]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "simpo": _simpo,
    "orpo": _orpo,
    "cpo": _cpo,
    "slic": _slic,
}


def aot_matched(kind: Literal["aot", "aot_unpaired"], whole: PairLogprobs, length_normalize: bool = False) -> Tensor:
    """What the aot losses compare each of an update's N pairs with: constants, from a pass without gradient over the whole update.

    They compare quantiles, so a micro-batch alone cannot know them. With these, the losses of any micro-batches of the update add up to the
    loss of the whole, and so do their gradients. Values that tie keep the order of the pairs.

    aot: [N], for the policy's difference log π_w − log π_l of each pair, the reference's difference of equal rank.
    aot_unpaired: [N, 2], for each chosen h the rejected one of equal rank, and for each rejected h the chosen one.
    """
    with torch.no_grad():
        chosen, rejected = log_ratios(kind, whole, length_normalize)
        if kind == "aot_unpaired":
            return torch.stack([_of_equal_rank(chosen, rejected), _of_equal_rank(rejected, chosen)], dim=1)
        reference_chosen, reference_rejected = _reference(whole)
        if length_normalize:
            reference_chosen, reference_rejected = _per_token(reference_chosen, reference_rejected, whole)
        return _of_equal_rank(chosen - rejected, reference_chosen - reference_rejected)


def _reference(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    assert pairs.reference_chosen is not None and pairs.reference_rejected is not None, "this loss compares with a reference"
    return pairs.reference_chosen, pairs.reference_rejected


def _per_token(chosen: Tensor, rejected: Tensor, pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    return chosen / pairs.chosen_tokens.clamp(min=1), rejected / pairs.rejected_tokens.clamp(min=1)


def _of_equal_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` [N] the one of `others` [N] that stands at its place once both are sorted."""
    matched = torch.empty_like(others)
    matched[values.argsort(stable=True)] = others.sort(stable=True).values
    return matched
