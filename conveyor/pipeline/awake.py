"""Which stage of a device group is awake, where stages leave the memory to one another. Pure, like the scheduler it belongs to.

    turn of a stage that sleeps ─▶ HandOver(group, leaving, coming) ─▶ the leaving workers sleep, then the coming ones wake ─▶ its tasks

A hand-over takes the turn of the stage that comes, so nothing else of its group runs meanwhile: nobody works asleep, and two stages
are never awake at once. Publishing is a task of the trainer, so its weights lie in the object store before it sleeps, and are
installed when the engines are awake.
"""

from __future__ import annotations

from conveyor.pipeline.actions import HandOver
from conveyor.pipeline.run_plan import RunPlan


class Awake:
    """Of every group of `plan.sleeping`: who is awake, and whether that is about to change."""

    def __init__(self, plan: RunPlan) -> None:
        self._home = dict(plan.sleeping)
        self._awake = dict(plan.sleeping)
        self._moving: set[str] = set()

    def moving(self, group: str | None) -> bool:
        return group in self._moving

    def is_asleep(self, group: str | None, stage: str) -> bool:
        return group in self._awake and self._awake[group] != stage

    def before(self, group: str | None, stage: str) -> HandOver | None:
        """What has to happen before a task of the stage; None: nothing."""
        if group is None or not self.is_asleep(group, stage):
            return None
        return HandOver(group, self._awake[group], stage)

    def start(self, action: HandOver) -> None:
        assert action.group not in self._moving and self._awake[action.group] == action.leaving
        self._moving.add(action.group)

    def done(self, action: HandOver) -> None:
        self._moving.remove(action.group)
        self._awake[action.group] = action.coming

    def way_home(self) -> list[HandOver]:
        """What makes those awake again that were at the start. Nothing may run."""
        assert not self._moving
        return [HandOver(group, now, self._home[group]) for group, now in self._awake.items() if now != self._home[group]]
