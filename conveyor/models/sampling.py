"""From logits to sampled tokens: each row by itself, from its own random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


class Draws:
    """Random numbers of one request, in [0, 1): its seed's n-th for its n-th token, whatever else is drawn."""

    BLOCK = 64

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: list[float] = []

    def next(self) -> float:
        if not self._waiting:
            drawn = torch.rand(self.BLOCK, dtype=torch.float64, generator=self._generator)
            self._waiting = drawn.flip(0).tolist()
        return self._waiting.pop()


def log_distribution(logits: Tensor, temperatures: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probabilities that are sampled from: after temperature, then top_k, then top_p of what top_k leaves.

    The nucleus is the smallest set of likeliest tokens with at least top_p of the probability (Holtzman et al. 2020); of top_k,
    tokens as likely as the k-th stay too. Temperature 0 stands for the likeliest token: its row is the model's own distribution, at
    temperature 1 and whole.

    Args:
        logits: float32 [n, V].
        temperatures: float32 [n].
        top_k: -1 or 0: off.
        top_p: 1.0: off.

    Returns:
        float32 [n, V], −inf for tokens that are left out.
    """
    greedy = temperatures == 0
    scores = logits / temperatures.masked_fill(greedy, 1.0)[:, None]
    cut = torch.zeros_like(scores, dtype=torch.bool)
    if 0 < top_k < scores.shape[1]:
        cut |= scores < scores.topk(top_k, dim=1).values[:, -1:]
    if top_p < 1:
        ordered, places = scores.masked_fill(cut, -torch.inf).sort(dim=1)  # ascending
        below = ordered.softmax(dim=1).cumsum(dim=1)
        outside = below <= 1 - top_p
        outside[:, -1] = False
        cut |= torch.zeros_like(cut).scatter(1, places, outside)
    return scores.masked_fill(cut & ~greedy[:, None], -torch.inf).log_softmax(dim=1)


def sample(logits: Tensor, temperatures: Tensor, draws: Tensor, top_k: int = -1, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """A token for each row: where the cumulative distribution passes the row's random number, or the likeliest at temperature 0.

    Args:
        logits, temperatures, top_k, top_p: as of `log_distribution`.
        draws: float64 [n], in [0, 1).

    Returns:
        int64 [n] tokens, float32 [n] their log-probabilities.
    """
    logprobs = log_distribution(logits, temperatures, top_k, top_p)
    cumulative = logprobs.double().exp_().cumsum(dim=1)
    total = cumulative[:, -1]
    # Rounding must not reach the total, behind which there is no token, or one of probability 0.
    reached = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, reached[:, None], right=True)[:, 0]
    tokens = torch.where(temperatures == 0, logits.argmax(dim=1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
