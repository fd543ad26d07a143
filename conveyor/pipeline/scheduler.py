"""The scheduler: a pure state machine that says what may start.

No Ray, no clock, no threads: events go in (`handle`), actions come out (`actions`). The executor
carries actions out on Ray actors, the simulator on a virtual clock; both drive this very class.

    prompts ─▶ Admit ─▶ Score (each part) ─▶ Prepare ─▶ Train … Train ─▶ Update ─▶ Publish ─▶ Install
                 ▲                                                                              │
                 └────────────────── the next step, once its version may start ◀────────────────┘

| action             | waits for                                                                    |
|--------------------|------------------------------------------------------------------------------|
| Admit group        | the group before it; room in an engine; step − engine's version ≤ staleness  |
| Score part         | all samples of the micro-batch; a free worker; snapshots: version = step     |
| Prepare            | every part of the micro-batch                                                |
| Train              | its turn in the update; with group baselines: its groups prepared; with      |
|                    | whitening: the whole update prepared; the train group free                   |
| Update             | every micro-batch of the update trained                                      |
| Publish            | the step's last update                                                       |
| InstallEngine      | the version published; without in-flight updates: the engine drained         |
| InstallSnapshot    | the version published; the worker free                                       |
| Checkpoint, Finish | the step published                                                           |

Device groups are resources: tasks of two stages never run on one group at once (`turns.py`). With
overlap off every task asks for one and the same resource, which makes the stages take turns.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from conveyor.pipeline.actions import (
    Action,
    Admit,
    Event,
    Finish,
    InstallEngine,
    InstallSnapshot,
    Prepare,
    Publish,
    SampleFinished,
    Score,
)
from conveyor.pipeline.batching import MicroBatch, UpdateBatcher, cut_into_updates
from conveyor.pipeline.run_plan import RunPlan
from conveyor.pipeline.train_line import TrainLine
from conveyor.pipeline.turns import Turns
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey


class Scheduler:
    """Drives one run. A driver calls `actions()`, carries them out, and calls `handle(event)` and
    `actions()` again for everything that happens, until `finished`.

    Example: a fresh scheduler's `actions()` admits the first groups; each `SampleFinished` handed to
    `handle` may complete a micro-batch, whose `Score` actions the next `actions()` returns.
    """

    def __init__(self, plan: RunPlan) -> None:
        assert plan.step_groups and min(plan.step_groups) > 0, "a run has steps, a step has groups"
        self.plan = plan
        self._starts = (0, *accumulate(plan.step_groups))
        self._updates: dict[int, tuple[UpdateBatcher, ...]] = {}
        self._micro_batches: dict[MicroBatchKey, MicroBatch] = {}
        self._step_to_admit = plan.start_step
        self._next_group = self._starts[plan.start_step]

        # Before an initial sync nothing holds the first version yet.
        self._published = plan.start_step - 1 if plan.initial_sync else plan.start_step
        self._publishing: Counter[int] = Counter()
        self._finishing: Counter[int] = Counter()
        self._engine_version = [self._published] * plan.engines
        self._engine_load: list[Counter[int]] = [Counter() for _ in range(plan.engines)]
        self._engine_samples = [0] * plan.engines
        self._engine_installing: set[int] = set()
        self._old_engines: set[int] = set()
        """Engines that hold an older version than the newest."""
        self._maybe_able = set(range(plan.engines))
        """Engines that something has happened to since they were last found unable to take a group: the others still are."""
        self._snapshot_version = {
            (number, worker): self._published
            for number, part in enumerate(plan.parts)
            if part.versioned
            for worker in range(plan.part_workers[number])
        }
        self._old_snapshots: set[tuple[int, int]] = set()
        """(part, worker) that holds an older version than the newest."""
        self._busy_workers: set[tuple[str, int]] = set()
        self._to_score: list[list[MicroBatchKey]] = [[] for _ in plan.parts]
        self._to_prepare: list[MicroBatch] = []
        self._lines = [TrainLine(plan, number) for number in range(len(plan.train_groups))]
        self._turns = Turns()

    # ── what a driver calls ──────────────────────────────────────────────────────────────────────

    @property
    def finished(self) -> bool:
        """Every step is trained, let go of, and its weights installed everywhere."""
        end = len(self.plan.step_groups)
        if any(line.step != end for line in self._lines):
            return False
        return all(version == end for version in (*self._engine_version, *self._snapshot_version.values()))

    @property
    def version(self) -> int:
        """Newest published version."""
        return self._published

    def actions(self) -> list[Action]:
        """Everything that may start now, each exactly once, in an order that depends on the events alone."""
        started: list[Action] = [
            Prepare(line.number, micro_batch.key, micro_batch.samples) for micro_batch in self._to_prepare for line in self._lines
        ]
        self._to_prepare.clear()
        while action := self._next_action():
            self._start(action)
            started.append(action)
        return started

    def handle(self, event: Event) -> None:
        """Take note of something that happened."""
        if isinstance(event, SampleFinished):
            self._sample_finished(event)
        else:
            self._done(event.action)

    # ── what is due ──────────────────────────────────────────────────────────────────────────────

    def _next_action(self) -> Action | None:
        due: dict[tuple[str, str], Action] = {}
        for stage, actions in (("train", self._training()), ("score", self._scoring()), ("rollout", self._sampling())):
            for action in actions:
                due.setdefault((self._resource(action), stage), action)
        turn = self._turns.next(due)
        if turn is None:
            return None
        self._turns.start(*turn)
        return due[turn]

    def _sampling(self) -> Iterator[Action]:
        for engine in sorted(self._old_engines - self._engine_installing):
            if self.plan.in_flight_update or not self._engine_load[engine]:
                yield InstallEngine(engine, self._published)
                break
        if self._next_group < self._starts[-1]:
            self._maybe_able = {engine for engine in self._maybe_able if self._may_admit(engine)}
            if self._maybe_able:
                engine = min(self._maybe_able, key=lambda e: (self._engine_samples[e], e))
                yield Admit(engine, self._next_group, self._step_to_admit)

    def _may_admit(self, engine: int) -> bool:
        version = self._engine_version[engine]
        room = self._engine_samples[engine] + self.plan.samples_per_group <= self.plan.engine_slots
        draining = engine in self._engine_installing or (version < self._published and not self.plan.in_flight_update)
        fresh = version >= self.plan.start_step and self._step_to_admit - version <= self.plan.max_staleness
        return room and fresh and not draining

    def _scoring(self) -> Iterator[Action]:
        for part, worker in sorted(self._old_snapshots):
            if (self.plan.parts[part].group, worker) not in self._busy_workers:
                yield InstallSnapshot(part, worker, self._published)
        for part, waiting in enumerate(self._to_score):
            # The first in line is of the oldest step; while no snapshot fits it, none fits those behind it.
            free = self._free_worker(part, waiting[0].step) if waiting else None
            if free is not None:
                yield Score(part, free, waiting[0], self._micro_batches[waiting[0]].samples)

    def _free_worker(self, part: int, step: int) -> int | None:
        for worker in range(self.plan.part_workers[part]):
            free = (self.plan.parts[part].group, worker) not in self._busy_workers
            if free and self._snapshot_version.get((part, worker), step) == step:
                return worker
        return None

    def _training(self) -> Iterator[Action]:
        for line in self._lines:
            if action := line.due(self._updates.get(line.step)):
                yield action

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def _start(self, action: Action) -> None:
        match action:
            case Admit(engine, group, step):
                self._engine_load[engine][group] = self.plan.samples_per_group
                self._engine_samples[engine] += self.plan.samples_per_group
                self._open_step(step)
                self._next_group += 1
                if self._next_group == self._starts[step + 1]:
                    self._step_to_admit += 1
            case InstallEngine(engine, _):
                self._engine_installing.add(engine)
            case InstallSnapshot(part, worker, _):
                self._busy_workers.add((self.plan.parts[part].group, worker))
            case Score(part, worker, _, _):
                heapq.heappop(self._to_score[part])
                self._busy_workers.add((self.plan.parts[part].group, worker))
            case _:
                self._lines[action.train_group].busy = True

    def _open_step(self, step: int) -> None:
        if step not in self._updates:
            plan, groups = self.plan, range(self._starts[step], self._starts[step + 1])
            samples = tuple(SampleId(group, sample) for group in groups for sample in range(plan.samples_per_group))
            self._updates[step] = cut_into_updates(step, samples, plan.samples_per_update, plan.micro_batch_size, plan.order)

    def _sample_finished(self, event: SampleFinished) -> None:
        load, group = self._engine_load[event.engine], event.id.group
        assert load[group] > 0, f"{event.id} came from engine {event.engine}, which does not hold its group"
        load[group] -= 1
        self._engine_samples[event.engine] -= 1
        self._maybe_able.add(event.engine)
        if not load[group]:
            # An Admit takes one turn, however many samples it brings.
            del load[group]
            self._turns.end(self.plan.resource(self.plan.rollout_group))
        step = next(step for step in self._updates if self._starts[step] <= group < self._starts[step + 1])
        staleness = step - event.oldest_version
        assert 0 <= staleness <= self.plan.max_staleness, f"{event.id}: staleness {staleness} is out of bounds"
        place = (group - self._starts[step]) * self.plan.samples_per_group + event.id.sample
        micro_batch = self._updates[step][place // self.plan.samples_per_update].finish(event.id)
        if micro_batch is not None:
            self._micro_batches[micro_batch.key] = micro_batch
            for waiting in self._to_score:
                heapq.heappush(waiting, micro_batch.key)

    def _done(self, action: Action) -> None:
        if not isinstance(action, Prepare):
            self._turns.end(self._resource(action))
        match action:
            case Score(part, worker, key, _):
                self._busy_workers.discard((self.plan.parts[part].group, worker))
                micro_batch = self._micro_batches[key]
                micro_batch.scored.add(part)
                if len(micro_batch.scored) == len(self.plan.parts):
                    self._to_prepare.append(self._micro_batches.pop(key))
            case InstallSnapshot(part, worker, version):
                self._busy_workers.discard((self.plan.parts[part].group, worker))
                self._snapshot_version[part, worker] = version
                if version == self._published:
                    self._old_snapshots.discard((part, worker))
            case InstallEngine(engine, version):
                self._engine_installing.discard(engine)
                self._engine_version[engine] = version
                self._maybe_able.add(engine)
                if version == self._published:
                    self._old_engines.discard(engine)
            case Admit():
                raise AssertionError("an Admit is answered by its samples")
            case _:
                line = self._lines[action.train_group]
                line.done(action, len(self._updates.get(line.step, ())))
                self._after_train_task(action)

    def _after_train_task(self, action: Action) -> None:
        """A version counts as published, and a step as let go of, when every train group has done so."""
        match action:
            case Publish(_, version):
                self._publishing[version] += 1
                if self._publishing[version] == len(self._lines):
                    self._published = version
                    self._old_engines = set(range(self.plan.engines))
                    self._old_snapshots = set(self._snapshot_version)
            case Finish(_, step):
                self._finishing[step] += 1
                if self._finishing[step] == len(self._lines):
                    del self._updates[step], self._finishing[step]
                    self._publishing.pop(step, None)

    def _resource(self, action: Action) -> str:
        match action:
            case Admit() | InstallEngine():
                return self.plan.resource(self.plan.rollout_group)
            case Score(part, _, _, _) | InstallSnapshot(part, _, _):
                return self.plan.resource(self.plan.parts[part].group)
            case _:
                return self.plan.resource(self.plan.train_groups[action.train_group].group)
