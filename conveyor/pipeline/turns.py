"""Turns: stages that share a device group never run on it at once.

The stage that holds a group keeps it while it has tasks running or due there, so stages that take
turns (engines asleep while the trainer works, optimizer state moved out and back) change as seldom
as possible. A free group goes to the stage furthest down the pipeline that has something due.
A task needs one group only, so nobody waits for a second one while holding a first: no deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


class Turns:
    """Who holds which resource, by stage name."""

    def __init__(self) -> None:
        self._holder: dict[str, str] = {}
        self._running: Counter[str] = Counter()

    def next(self, due: Collection[tuple[str, str]]) -> tuple[str, str] | None:
        """The first (resource, stage) of `due` whose turn it is; `due` lists later stages first and
        holds only what could start at once."""
        for resource, stage in due:
            holder = self._holder.get(resource)
            released = not self._running[resource] and (resource, holder) not in due
            if stage == holder or released:
                return resource, stage
        return None

    def start(self, resource: str, stage: str) -> None:
        """A task of `stage` starts on `resource`."""
        assert self._holder.get(resource) == stage or not self._running[resource], f"{stage} started on {resource} out of turn"
        self._holder[resource] = stage
        self._running[resource] += 1

    def end(self, resource: str) -> None:
        """A task has ended on `resource`."""
        assert self._running[resource] > 0, f"more tasks ended on {resource} than started"
        self._running[resource] -= 1
