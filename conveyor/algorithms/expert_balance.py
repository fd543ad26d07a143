"""Auxiliary losses that keep the experts of a mixture equally busy. Pure.

Letters: N tokens, E experts, K of them chosen for a token, B samples, L layers of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Statistic = Literal["sequence", "micro_batch"]
"""Over which tokens the shares are counted whose product is the loss."""


@dataclass(frozen=True, slots=True)
class RouterSums:
    """What one layer's router did with the tokens of each sample."""

    chosen: Tensor
    """float32 [B, E]: how often an expert was chosen; has no gradient."""
    probability: Tensor
    """float32 [B, E]: the sum over tokens of the router's probability of an expert; has one."""


def router_sums(probabilities: Tensor, experts: Tensor, owners: Tensor, samples: int) -> RouterSums:
    """The sums of one layer, sample by sample.

    Args:
        probabilities: [N, E], each token's add up to 1.
        experts: int64 [N, K]: those chosen.
        owners: int64 [N]: the sample of each token; −1: of none (padding), which counts nowhere.
        samples: B.
    """
    count = probabilities.shape[1]
    rows = torch.where(owners < 0, samples, owners)  # one row more, for tokens of no sample
    places = (rows[:, None] * count + experts).flatten()
    chosen = torch.bincount(places, minlength=(samples + 1) * count).view(samples + 1, count)
    summed = probabilities.new_zeros(samples + 1, count, dtype=torch.float32).index_add(0, rows, probabilities.float())
    return RouterSums(chosen[:samples].float(), summed[:samples])


def sequence_balance(layers: Sequence[RouterSums], lengths: Tensor) -> Tensor:
    """float32 [B]: Σ_e f_e P_e of each sample by itself, the mean over layers (DeepSeek-V3, arXiv 2412.19437, eq. 17–20).

    f_e = E/(K·T) · (how often e was chosen), P_e = the mean probability of e over the sample's T tokens. 1 where all experts are equally
    likely; E/K where the same K experts always share all of it. Depends on nothing outside of the sample.

    Args:
        lengths: int64 [B]: T of each sample.
    """
    total = torch.stack([(sums.chosen * sums.probability).sum(1) for sums in layers]).mean(0)
    experts, tokens = layers[0].chosen.shape[1], lengths.float()
    return total * experts / (_chosen_each(layers, lengths) * tokens**2)


def pooled_balance(layers: Sequence[RouterSums], lengths: Tensor) -> Tensor:
    """float32 scalar: E · Σ_e F_e P_e, both shares taken over all tokens of all layers together (Fedus et al. 2021, arXiv 2101.03961,
    eq. 4–6, as transformers computes it for mixtures of experts). K where all experts are equally likely, E where one takes everything.

    Arguments as of `sequence_balance`.
    """
    chosen = torch.stack([sums.chosen.sum(0) for sums in layers]).sum(0)
    probability = torch.stack([sums.probability.sum(0) for sums in layers]).sum(0)
    tokens = lengths.sum().float() * len(layers)
    return len(chosen) * (chosen * probability).sum() / tokens**2


def weighted_balance(layers: Sequence[RouterSums], lengths: Tensor, weights: Tensor, statistic: Statistic) -> Tensor:
    """float32 scalar: the balance loss as a sum that, like the other losses, is divided by the update's denominator in the end.

    Args:
        weights: float32 [B]: each sample's part of that denominator, so that the quotient is a mean: of the samples' own losses, or of
            the micro-batches' (which depend on how the samples are cut into micro-batches).
    """
    if statistic == "micro_batch":
        return weights.sum() * pooled_balance(layers, lengths)
    return (weights * sequence_balance(layers, lengths)).sum()


def sample_weights(loss_mask: Tensor, aggregation: str, max_response_length: int, signs: Tensor | None = None) -> Tensor:
    """float32 [B]: each sample's part of the denominator of the policy loss.

    Args:
        loss_mask: bool [B, S].
        aggregation: `algorithm.loss_aggregation`: tokens, sequences with a token in the loss, or a constant a sample.
        signs: [B], of `policy_loss: dpo`: which side of a pair a sample is; the two share the pair's 1. 0: in no pair.
    """
    if signs is not None:
        return (signs != 0).float() / 2
    tokens = loss_mask.sum(1).float()
    if aggregation == "constant":
        return torch.full_like(tokens, max_response_length)
    return tokens if aggregation == "token_mean" else (tokens > 0).float()


def _chosen_each(layers: Sequence[RouterSums], lengths: Tensor) -> Tensor:
    """float32 scalar: K, which every token of every sample chooses."""
    return layers[0].chosen.sum() / lengths.sum().clamp(min=1)
