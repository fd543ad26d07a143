"""How a step's samples become updates and micro-batches. Pure.

An update's samples are fixed by prompt order before anything is sampled, so several updates a step
mean the same whatever arrives first. Within an update, micro-batches are cut by prompt order, or
filled in the order samples finish. Where a step is made of the groups that finish first
(`membership.py`), its updates are filled one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey


@dataclass(slots=True)
class MicroBatch:
    """Samples on their way through the score stage together."""

    key: MicroBatchKey
    samples: tuple[SampleId, ...]
    scored: set[int] = field(default_factory=set)
    """Score parts that are done with it."""
    unjudged: int = 0
    """Samples that functions and urls have not answered for."""


class UpdateBatcher:
    """Cuts the samples of one update into micro-batches as they finish.

    All have `size` samples but the last, so their number is known from the start.
    """

    def __init__(
        self, step: int, update: int, total: int, size: int, order: Literal["prompt", "completion"], samples: tuple[SampleId, ...] | None
    ) -> None:
        """Args:
        total: samples of the update.
        samples: which; None: those that finish first.
        """
        self.step, self.update, self.total, self.size, self.order = step, update, total, size, order
        self.samples = samples
        self.count = -(-total // size)
        self._position = None if samples is None else {sample: place for place, sample in enumerate(samples)}
        self._finished: set[SampleId] = set()
        self._missing = [min(size, total - first) for first in range(0, total, size)]
        """Of each micro-batch in prompt order: its samples that have not finished."""
        self._open: list[SampleId] = []
        self._made = 0

    @property
    def full(self) -> bool:
        return len(self._finished) == self.total

    def finish(self, sample: SampleId) -> MicroBatch | None:
        """Note a finished sample; returns the micro-batch that it completes, if any."""
        known = self._position is None or sample in self._position
        assert known and sample not in self._finished and not self.full, f"{sample} finished twice or in a foreign update"
        self._finished.add(sample)
        return self._by_prompt(sample) if self.order == "prompt" else self._by_completion(sample)

    def _by_prompt(self, sample: SampleId) -> MicroBatch | None:
        assert self.samples is not None and self._position is not None
        number = self._position[sample] // self.size
        self._missing[number] -= 1
        if self._missing[number]:
            return None
        return self._make(number, self.samples[number * self.size : (number + 1) * self.size])

    def _by_completion(self, sample: SampleId) -> MicroBatch | None:
        self._open.append(sample)
        if len(self._open) < self.size and not self.full:
            return None
        members, self._open = tuple(self._open), []
        return self._make(self._made, members)

    def _make(self, number: int, members: tuple[SampleId, ...]) -> MicroBatch:
        self._made += 1
        return MicroBatch(MicroBatchKey(self.step, self.update, number), members)


def cut_into_updates(
    step: int,
    total: int,
    samples_per_update: int,
    size: int,
    order: Literal["prompt", "completion"],
    samples: tuple[SampleId, ...] | None = None,
) -> tuple[UpdateBatcher, ...]:
    """The updates of a step of `total` samples; `samples`: which ones, where that is known. A short step has fewer updates,
    and its last one may be short."""

    def update(number: int, first: int) -> UpdateBatcher:
        end = min(first + samples_per_update, total)
        return UpdateBatcher(step, number, end - first, size, order, None if samples is None else samples[first:end])

    return tuple(update(number, first) for number, first in enumerate(range(0, total, samples_per_update)))
