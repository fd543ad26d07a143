"""Models of a rollout engine on a virtual clock.

Both jump from one finished sample to the next, so their cost does not grow with the number of tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from conveyor.plan.lengths import Size
from conveyor.types import SampleId


class Engine(Protocol):
    """One engine. Times are seconds and never go back from call to call."""

    def admit(self, samples: Sequence[tuple[SampleId, Size]], now: float) -> None:
        """The samples of one prompt join."""

    def install(self, seconds: float, now: float) -> tuple[float, float]:
        """New weights, which take `seconds` to load; returns when loading starts and ends."""

    def next_finish(self) -> float | None:
        """When a sample finishes next, if nothing else happens; None: there is none."""

    def finish(self) -> list[SampleId]:
        """Go to `next_finish()`; returns the samples that finish then."""


class EngineModel(Protocol):
    def start(self) -> Engine:
        """A new engine at time 0, empty."""


@dataclass(frozen=True, slots=True)
class FixedDurations:
    """Every sample takes the seconds it is told, whatever else runs; an install stops nothing."""

    seconds: Mapping[SampleId, float]

    def start(self) -> Engine:
        return _FixedEngine(self.seconds)


class _FixedEngine:
    def __init__(self, seconds: Mapping[SampleId, float]) -> None:
        self._seconds = seconds
        self._running: list[tuple[float, int, SampleId]] = []
        self._count = 0

    def admit(self, samples: Sequence[tuple[SampleId, Size]], now: float) -> None:
        for sample, _ in samples:
            heapq.heappush(self._running, (now + self._seconds[sample], self._count, sample))
            self._count += 1

    def install(self, seconds: float, now: float) -> tuple[float, float]:
        return now, now + seconds

    def next_finish(self) -> float | None:
        return self._running[0][0] if self._running else None

    def finish(self) -> list[SampleId]:
        now, found = self._running[0][0], []
        while self._running and self._running[0][0] == now:
            found.append(heapq.heappop(self._running)[2])
        return found


@dataclass(frozen=True, slots=True)
class Iterations:
    """Continuous batching: an iteration gives one token to each of the r running samples. Seconds of one:

        constant + per_sample · r + max(weights, compute · r) + per_cached_token · (tokens of all running samples)

    A prompt that joins is computed once for all its samples and holds everybody up for `per_prompt_token` seconds a token; an
    install does so for all tokens so far, whose cache it makes anew (as the rollout worker does). Samples join, and weights are
    loaded, at the end of an iteration.
    """

    constant: float = 0.0
    per_sample: float = 0.0
    weights: float = 0.0
    """Reading the weights, which r samples share."""
    compute: float = 0.0
    """Arithmetic of one token: hidden behind reading the weights while r is small."""
    per_cached_token: float = 0.0
    per_prompt_token: float = 0.0

    def start(self) -> Engine:
        return _IterationEngine(self)

    def seconds(self, running: float, tokens: float) -> float:
        """Of an iteration with so many samples running, which hold so many tokens."""
        fixed = self.constant + self.per_sample * running + max(self.weights, self.compute * running)
        return fixed + self.per_cached_token * tokens


class _IterationEngine:
    """`_clock` is always the end of an iteration (or of a prefill or install after it), at or beyond the time of the last call."""

    def __init__(self, model: Iterations) -> None:
        self._model = model
        self._clock = 0.0
        self._iteration = 0
        self._running: list[tuple[int, int, SampleId, Size]] = []
        """(iteration at whose end it finishes, number of joining, …): a heap."""
        self._cached = 0
        """Tokens of all running samples."""
        self._finished: deque[tuple[float, SampleId]] = deque()
        self._count = 0

    def admit(self, samples: Sequence[tuple[SampleId, Size]], now: float) -> None:
        self._run_until(now)
        self._clock += self._model.per_prompt_token * samples[0][1].prompt
        for sample, size in samples:
            heapq.heappush(self._running, (self._iteration + size.response, self._count, sample, size))
            self._cached += size.prompt
            self._count += 1

    def install(self, seconds: float, now: float) -> tuple[float, float]:
        self._run_until(now)
        start, end = self._clock, self._clock + seconds
        self._clock = end + self._model.per_prompt_token * self._cached
        return start, end

    def next_finish(self) -> float | None:
        if self._finished:
            return self._finished[0][0]
        if not self._running:
            return None
        return self._clock + self._seconds(self._running[0][0] - self._iteration)

    def finish(self) -> list[SampleId]:
        if not self._finished:
            self._iterate(self._running[0][0] - self._iteration)
        now, found = self._finished[0][0], []
        while self._finished and self._finished[0][0] == now:
            found.append(self._finished.popleft()[1])
        return found

    def _run_until(self, now: float) -> None:
        """To the end of the iteration that is going on at `now`."""
        while self._running and self._clock < now:
            to_finish = self._running[0][0] - self._iteration
            whole = self._clock + self._seconds(to_finish) <= now
            self._iterate(to_finish if whole else min(to_finish, self._iterations(now - self._clock)))
        self._clock = max(self._clock, now)

    def _iterate(self, count: int) -> None:
        self._clock += self._seconds(count)
        self._iteration += count
        self._cached += count * len(self._running)
        while self._running and self._running[0][0] <= self._iteration:
            _, _, sample, size = heapq.heappop(self._running)
            self._cached -= size.total
            self._finished.append((self._clock, sample))

    def _first(self) -> tuple[float, float]:
        """Seconds of the next iteration, and how much longer each further one takes, the same samples running."""
        running = len(self._running)
        return self._model.seconds(running, self._cached), self._model.per_cached_token * running

    def _seconds(self, count: int) -> float:
        first, growth = self._first()
        return count * first + growth * count * (count - 1) / 2

    def _iterations(self, seconds: float) -> int:
        """Fewest iterations that last `seconds` or longer."""
        first, growth = self._first()
        linear = first - growth / 2
        # The positive root of growth/2 n² + linear n = seconds, in the form that is exact for growth 0.
        root = 2 * seconds / (linear + math.sqrt(linear**2 + 2 * growth * seconds)) if first > 0 else 1.0
        return max(1, math.ceil(root - 1e-9))
