"""The line of work of one train group: micro-batches, updates, and what closes a step. Pure.

    Train … Train ─▶ Update ─▶ (next update or pass) … ─▶ Publish ─▶ Checkpoint? ─▶ Finish ─▶ next step

The ranks of a train group work as one and do one task at a time. The next Train of an update is sent while one runs: without it, the
ranks would wait after every micro-batch until the driver has heard of it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict

from conveyor.pipeline.actions import Action, Checkpoint, Finish, Prepare, Publish, Train, Update
from conveyor.pipeline.batching import UpdateBatcher
from conveyor.pipeline.run_plan import RunPlan
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey

AHEAD = 2
"""Train tasks of an update that the ranks hold at a time."""


class TrainLine:
    """Where a train group stands: `step`, `update` (counting all passes) and what it has prepared."""

    def __init__(self, plan: RunPlan, number: int) -> None:
        self.plan, self.number = plan, number
        self.step = plan.start_step
        self.update = 0
        self._running = 0
        """Tasks sent to the ranks and not done."""
        self._sent: set[int] = set()
        """Micro-batches of the update whose Train has been sent."""
        self._closing: list[Action] = [Publish(number, plan.start_step)] if plan.initial_sync else []
        self._trained = 0
        """How many of them are done."""
        self._prepared: dict[MicroBatchKey, tuple[SampleId, ...]] = {}
        self._prepared_in_group: Counter[int] = Counter()
        self._prepared_in_update: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(step, update) → numbers of its prepared micro-batches, in order."""
        self._next: Action | None = None
        self._known = False
        """Nothing has happened since `_next` was found."""

    def due(self, updates: tuple[UpdateBatcher, ...] | None) -> Action | None:
        """The next task, if it may start now. `updates`: those of `self.step`, None before it is opened."""
        if self._closing:
            return None if self._running else self._closing[0]
        if updates is None:
            return None
        if not self._known:
            self._next, self._known = self._find(updates[self.update % len(updates)]), True
        return self._next

    def _find(self, batcher: UpdateBatcher) -> Action | None:
        if self._trained == batcher.count:
            return None if self._running else Update(self.number, self.step, self.update, batcher.update)
        return self._next_train(batcher) if self._running < AHEAD else None

    def _next_train(self, batcher: UpdateBatcher) -> Train | None:
        prepared = self._prepared_in_update[self.step, batcher.update]
        if self.plan.waits_for_update and len(prepared) < batcher.count:
            return None
        # Prompt order: the one whose turn it is, or none. Completion order: the first that can.
        numbers = [len(self._sent)] if self.plan.order == "prompt" else prepared
        for number in numbers:
            if number in self._sent:
                continue
            key = MicroBatchKey(self.step, batcher.update, number)
            samples = self._prepared.get(key)
            if samples is not None and self._groups_prepared(samples):
                return Train(self.number, key, samples, self.update, last=len(self._sent) == batcher.count - 1)
        return None

    def _groups_prepared(self, samples: tuple[SampleId, ...]) -> bool:
        whole = self.plan.samples_per_group
        return not self.plan.waits_for_group or all(self._prepared_in_group[sample.group] == whole for sample in samples)

    def start(self, action: Action) -> None:
        """Note that a task is sent to the ranks, which do them in this order."""
        self._known = False
        self._running += 1
        if isinstance(action, Train):
            self._sent.add(action.key.number)

    def done(self, action: Action, updates_in_step: int) -> None:
        """Note that a task of this group has ended."""
        self._known = False
        if isinstance(action, Prepare):
            self._prepared[action.key] = action.samples
            self._prepared_in_group.update(sample.group for sample in action.samples)
            insort(self._prepared_in_update[action.key.step, action.key.update], action.key.number)
            return
        self._running -= 1
        match action:
            case Train():
                self._trained += 1
            case Update():
                self._trained = 0
                self._sent.clear()
                self.update += 1
                if self.update == self.plan.update_epochs * updates_in_step:
                    self._closing = self._close()
            case Publish() | Checkpoint():
                self._closing.pop(0)
            case Finish():
                self._closing.pop(0)
                self._forget(self.step)
                self.step, self.update = self.step + 1, 0

    def _close(self) -> list[Action]:
        done, every = self.step + 1, self.plan.checkpoint_every
        due = every is not None and (done % every == 0 or done == len(self.plan.step_groups))
        save: list[Action] = [Checkpoint(self.number, done)] if due else []
        return [Publish(self.number, done), *save, Finish(self.number, self.step)]

    def _forget(self, step: int) -> None:
        for key in [key for key in self._prepared if key.step == step]:
            for sample in self._prepared.pop(key):
                self._prepared_in_group.pop(sample.group, None)
            self._prepared_in_update.pop((key.step, key.update), None)
