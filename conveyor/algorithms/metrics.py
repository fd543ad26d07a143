"""Metrics that can be added up over micro-batches and ranks without losing their denominator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum and the number of things summed; adding two keeps the mean of all things exact."""

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Load:
    """How unevenly experts were chosen: the largest, or the smallest, share of any expert of any layer, 1 being an equal one."""

    counts: tuple[tuple[int, ...], ...]
    """Layer by layer, how often each expert was chosen."""
    extreme: Literal["max", "min"]

    def __add__(self, other: Load) -> Load:
        added = [tuple(map(sum, zip(mine, others, strict=True))) for mine, others in zip(self.counts, other.counts, strict=True)]
        return Load(tuple(added), self.extreme)

    @property
    def value(self) -> float:
        of_layers = [(max if self.extreme == "max" else min)(counts) * len(counts) / max(1, sum(counts)) for counts in self.counts]
        return max(of_layers) if self.extreme == "max" else min(of_layers)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of the advantages of tokens in the loss."""

    count: float
    total: float
    squares: float
    unshifted: float = 0.0
    """Sum of squares before `shifted`: how much of `squares` may be nothing but rounding."""

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares, self.unshifted + other.unshifted)

    def shifted(self, by: float) -> Moments:
        """Of the same values + `by`."""
        squares = self.squares + 2 * by * self.total + self.count * by**2
        return Moments(self.count, self.total + self.count * by, squares, max(self.unshifted, self.squares))


Metrics = dict[str, Mean | Max | Load]
"""Metric name (design: `loss/policy`, `ratio/max`, …) → its mergeable value."""


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Add up metrics of micro-batches or ranks, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged
