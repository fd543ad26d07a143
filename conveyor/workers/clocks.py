"""Clocks of several machines compared with the driver's, as NTP does it (RFC 5905, section 8; here the worker takes one timestamp)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

PINGS = 5
READING_ERROR = 1e-6
"""Seconds; a float of today's seconds since 1970 is off by a quarter of this."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds that each worker's clock is ahead of the driver's, in the form of `start.Workers`. Not listed: 0."""

    engines: tuple[float, ...] = ()
    scorers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    trainers: tuple[tuple[float, ...], ...] = ()


async def clock_offset(read: Callable[[], Awaitable[float]], now: Callable[[], float] = time.time) -> float:
    """Seconds that another clock is ahead of `now`: its time less the middle of the question and the answer, of the quickest answer.

    The true offset lies within half that answer's round trip; an offset that is not larger than this error counts as 0, so
    that workers of one machine keep the clock they share.

    Args:
        read: asks the other process for its `time.time()`.
    """
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        asked = now()
        theirs = await read()
        answered = now()
        best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    round_trip, offset = best
    return offset if abs(offset) > round_trip / 2 + READING_ERROR else 0.0
