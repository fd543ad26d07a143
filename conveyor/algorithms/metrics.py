"""Metrics that can be added up over micro-batches and ranks without losing their denominator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


Metrics = dict[str, Mean | Max]
"""Metric name (design: `loss/policy`, `ratio/max`, …) → its mergeable value."""


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Add up metrics of micro-batches or ranks, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged
