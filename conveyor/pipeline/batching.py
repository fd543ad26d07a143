"""How a step's samples become updates and micro-batches. Pure.

An update's samples are fixed by prompt order before anything is sampled, so several updates a step
mean the same whatever arrives first. Within an update, micro-batches are cut by prompt order, or
filled in the order samples finish.
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


class UpdateBatcher:
    """Cuts the samples of one update into micro-batches as they finish.

    All have `size` samples but the last, so their number is known from the start.
    """

    def __init__(self, step: int, update: int, samples: tuple[SampleId, ...], size: int, order: Literal["prompt", "completion"]) -> None:
        self.step, self.update, self.samples, self.size, self.order = step, update, samples, size, order
        self.count = -(-len(samples) // size)
        self._position = {sample: place for place, sample in enumerate(samples)}
        self._finished: set[SampleId] = set()
        self._open: list[SampleId] = []
        self._made = 0

    def finish(self, sample: SampleId) -> MicroBatch | None:
        """Note a finished sample; returns the micro-batch that it completes, if any."""
        assert sample in self._position and sample not in self._finished, f"{sample} finished twice or in a foreign update"
        self._finished.add(sample)
        return self._by_prompt(sample) if self.order == "prompt" else self._by_completion(sample)

    def _by_prompt(self, sample: SampleId) -> MicroBatch | None:
        number = self._position[sample] // self.size
        members = self.samples[number * self.size : (number + 1) * self.size]
        return self._make(number, members) if self._finished.issuperset(members) else None

    def _by_completion(self, sample: SampleId) -> MicroBatch | None:
        self._open.append(sample)
        if len(self._open) < self.size and len(self._finished) < len(self.samples):
            return None
        members, self._open = tuple(self._open), []
        return self._make(self._made, members)

    def _make(self, number: int, members: tuple[SampleId, ...]) -> MicroBatch:
        self._made += 1
        return MicroBatch(MicroBatchKey(self.step, self.update, number), members)


def cut_into_updates(
    step: int, samples: tuple[SampleId, ...], samples_per_update: int, size: int, order: Literal["prompt", "completion"]
) -> tuple[UpdateBatcher, ...]:
    """The updates of a step. A short step has fewer, and its last one may be short."""
    cuts = range(0, len(samples), samples_per_update)
    return tuple(UpdateBatcher(step, u, samples[cut : cut + samples_per_update], size, order) for u, cut in enumerate(cuts))
