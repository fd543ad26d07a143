"""The scheduler: a pure state machine that says what may start.

No Ray, no clock, no threads: events go in (`handle`), actions come out (`actions`). The executor
carries actions out on Ray actors, the simulator on a virtual clock; both drive this very class.

    prompts ─▶ Admit ─▶ Score (each part) ─▶ Prepare ─▶ Train … Train ─▶ Update ─▶ Publish ─▶ Install
                 ▲                                                                              │
                 └────────────────── the next step, once its version may start ◀────────────────┘

| action             | waits for                                                                    |
|--------------------|------------------------------------------------------------------------------|
| Admit group        | the group before it; room in an engine; step − engine's version ≤ staleness  |
|                    | (`membership.py`)                                                            |
| Score part         | all samples of the micro-batch; a free worker; snapshots: version = step     |
| Prepare            | every part of the micro-batch                                                |
| Train              | its turn in the update; with group baselines: its groups prepared; with      |
|                    | whitening: the whole update prepared; at most one other at the train group   |
| Update             | every micro-batch of the update trained                                      |
| Publish            | the step's last update                                                       |
| InstallEngine      | the version published; without in-flight updates: the engine drained         |
| InstallSnapshot    | the version published; the worker free                                       |
| Checkpoint, Finish | the step published                                                           |
| Evaluate           | a version due for evaluation; an engine with nothing else to do (`evaluation.py`) |

Device groups are resources: tasks of two stages never run on one group at once (`turns.py`). With
overlap off every task asks for one and the same resource, which makes the stages take turns.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from conveyor.pipeline.actions import (
    Action,
    Admit,
    Checkpoint,
    CloseEvaluation,
    Evaluate,
    EvaluationSampled,
    Event,
    Finish,
    InstallEngine,
    InstallSnapshot,
    Prepare,
    Publish,
    SampleFinished,
    Score,
    ScoreEvaluation,
    Train,
    Update,
)
from conveyor.pipeline.batching import MicroBatch, UpdateBatcher, cut_into_updates
from conveyor.pipeline.engine_pool import EnginePool
from conveyor.pipeline.evaluation import Evaluation
from conveyor.pipeline.membership import Membership
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
        self.membership = Membership(plan)
        self._updates: dict[int, tuple[UpdateBatcher, ...]] = {}
        self._micro_batches: dict[MicroBatchKey, MicroBatch] = {}
        self._oldest: dict[int, int] = {}
        """Groups in flight → oldest version of their finished samples."""
        self._group_samples: dict[int, list[SampleId]] = {}
        """Finished samples of groups whose step is not known yet."""

        # Before an initial sync nothing holds the first version yet.
        self._published = plan.start_step - 1 if plan.initial_sync else plan.start_step
        self._publishing: Counter[int] = Counter()
        self._finishing: Counter[int] = Counter()
        self.engines = EnginePool(plan, self._published)
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
        self.evaluation = Evaluation(plan)
        if not plan.initial_sync:
            self.evaluation.open(self._published)

    # ── what a driver calls ──────────────────────────────────────────────────────────────────────

    @property
    def finished(self) -> bool:
        """Every step is trained, let go of, and its weights installed everywhere."""
        end = len(self.plan.step_groups)
        if any(line.step != end for line in self._lines):
            return False
        installed = all(version == end for version in (*self.engines.versions, *self._snapshot_version.values()))
        return installed and self.evaluation.finished

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
        while self.plan.evaluation and (close := self.evaluation.to_close(self.engines.held, self._published)):
            self.evaluation.start_close(close)
            started.append(close)
        return started

    def handle(self, event: Event) -> None:
        """Take note of something that happened."""
        match event:
            case SampleFinished():
                self._sample_finished(event)
            case EvaluationSampled():
                self._evaluation_sampled(event)
            case _:
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
        engine = self.engines.to_install(self._keeps_version)
        if engine is not None:
            yield InstallEngine(engine, self._published)
        held_out = self.plan.evaluation is not None
        if held_out:
            yield from self._evaluating(first=True)
        group = self.membership.next_group
        if group is not None and (engine := self.engines.able(self.membership.may_admit)) is not None:
            yield Admit(engine, group, self.membership.prompt_step(group))
        if held_out:
            yield from self._evaluating(first=False)

    def _keeps_version(self, version: int) -> bool:
        """An evaluation that does not give way is still sampling."""
        facts = self.plan.evaluation
        return facts is not None and not facts.in_bubbles and self.evaluation.sampling(version)

    def _evaluating(self, first: bool) -> Iterator[Action]:
        """Held-out prompts: before the training's (`first`), or on engines that have none of those."""
        facts = self.plan.evaluation
        if facts is None or first == facts.in_bubbles or self.evaluation.finished:
            return
        for engine, version in enumerate(self.engines.versions):
            prompt = self.evaluation.next_prompt(version)
            may = self.engines.idle(engine) if facts.in_bubbles else not self.engines.installing(engine)
            if prompt is not None and may and self.engines.has_room(engine, facts.samples_per_prompt):
                yield Evaluate(engine, prompt, version)
                return

    def _scoring(self) -> Iterator[Action]:
        for part, worker in sorted(self._old_snapshots):
            if (self.plan.parts[part].group, worker) not in self._busy_workers:
                yield InstallSnapshot(part, worker, self._published)
        for part, waiting in enumerate(self._to_score):
            # The first in line is of the oldest step; while no snapshot fits it, none fits those behind it.
            free = self._free_worker(part, waiting[0].step) if waiting else None
            if free is not None:
                yield Score(part, free, waiting[0], self._micro_batches[waiting[0]].samples)
            elif not waiting and not self.evaluation.finished:
                yield from self._scoring_evaluation(part)

    def _scoring_evaluation(self, part: int) -> Iterator[Action]:
        """Evaluations are scored when the training has nothing to score. Where it will have within the step (its samples are in
        the engines), they wait too, unless such a time never comes."""
        plan, group = self.plan, self.plan.parts[part].group
        never = plan.max_staleness > 0 or not plan.overlap or group in [line.group for line in plan.train_groups]
        if not never and (self.engines.sampling or self._micro_batches):
            return
        for worker in range(plan.part_workers[part]):
            if (group, worker) not in self._busy_workers and (action := self.evaluation.to_score(part, worker)):
                yield action
                return

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
            case Admit(engine, group, _):
                self.engines.admit(engine, group)
                self.membership.admit(self.engines.versions[engine])
                if (step := self.membership.step_of(group)) is not None:
                    self._open_step(step)
            case InstallEngine(engine, version):
                self.engines.install(engine, version)
            case InstallSnapshot(part, worker, _):
                self._busy_workers.add((self.plan.parts[part].group, worker))
            case Evaluate(engine, _, _):
                self.evaluation.start(action)
                self.engines.evaluate(engine, self.plan.evaluation.samples_per_prompt)  # type: ignore[union-attr]
            case ScoreEvaluation(part, worker, _, _):
                self.evaluation.start_score(action)
                self._busy_workers.add((self.plan.parts[part].group, worker))
            case Score(part, worker, _, _):
                heapq.heappop(self._to_score[part])
                self._busy_workers.add((self.plan.parts[part].group, worker))
            case Train() | Update() | Publish() | Checkpoint() | Finish():
                self._lines[action.train_group].start(action)

    def _open_step(self, step: int) -> None:
        if step not in self._updates:
            plan = self.plan
            total = plan.step_groups[step] * plan.samples_per_group
            samples = None if self.membership.by_completion else self.membership.samples(step)
            self._updates[step] = cut_into_updates(step, total, plan.samples_per_update, plan.micro_batch_size, plan.order, samples)

    def _sample_finished(self, event: SampleFinished) -> None:
        group = event.id.group
        whole = self.engines.sample_finished(event.engine, group)
        if whole:
            # An Admit takes one turn, however many samples it brings.
            self._turns.end(self.plan.resource(self.plan.rollout_group))
        self._oldest[group] = min(event.oldest_version, self._oldest.get(group, event.oldest_version))
        step = self.membership.step_of(group)
        # In completion order micro-batches are filled as samples come. Where training waits for whole groups they are filled by
        # groups, or each would hold samples of all groups in the engines and wait for the last of them.
        by_group = self.plan.order == "completion" and self.plan.waits_for_group
        if step is not None and not by_group:
            self._place(step, [event.id])
        else:
            self._group_samples.setdefault(group, []).append(event.id)
        if whole:
            self._group_finished(group)

    def _group_finished(self, group: int) -> None:
        step = self.membership.finish(group)
        staleness = step - self._oldest.pop(group)
        assert 0 <= staleness <= self.plan.max_staleness, f"group {group}: staleness {staleness} is out of bounds"
        self._open_step(step)
        self._place(step, self._group_samples.pop(group, []))

    def _place(self, step: int, samples: list[SampleId]) -> None:
        """Finished samples enter the updates of their step."""
        for sample in samples:
            if self.membership.by_completion:
                batcher = next(batcher for batcher in self._updates[step] if not batcher.full)
            else:
                batcher = self._updates[step][self.membership.place(sample) // self.plan.samples_per_update]
            micro_batch = batcher.finish(sample)
            if micro_batch is not None:
                self._micro_batches[micro_batch.key] = micro_batch
                for waiting in self._to_score:
                    heapq.heappush(waiting, micro_batch.key)

    def _evaluation_sampled(self, event: EvaluationSampled) -> None:
        self.engines.evaluated(event.engine, event.version)
        if self.evaluation.sampled(event):
            self._turns.end(self.plan.resource(self.plan.rollout_group))

    def _done(self, action: Action) -> None:
        if not isinstance(action, (Prepare, CloseEvaluation)):
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
                self.engines.installed(engine, version, self._published)
            case ScoreEvaluation(part, worker, _, _):
                self._busy_workers.discard((self.plan.parts[part].group, worker))
                self.evaluation.scored(action)
            case CloseEvaluation():
                self.evaluation.closed(action)
            case Admit() | Evaluate():
                raise AssertionError("an Admit is answered by its samples")
            case Prepare() | Train() | Update() | Publish() | Checkpoint() | Finish():
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
                    self.evaluation.open(version)
                    self.engines.published()
                    self._old_snapshots = set(self._snapshot_version)
            case Finish(_, step):
                self._finishing[step] += 1
                if self._finishing[step] == len(self._lines):
                    del self._updates[step], self._finishing[step]
                    self.membership.forget(step)
                    self._publishing.pop(step, None)

    def _resource(self, action: Action) -> str:
        match action:
            case Admit() | InstallEngine() | Evaluate():
                return self.plan.resource(self.plan.rollout_group)
            case Score(part, _, _, _) | InstallSnapshot(part, _, _) | ScoreEvaluation(part, _, _, _):
                return self.plan.resource(self.plan.parts[part].group)
            case CloseEvaluation():
                raise AssertionError("needs no resource")
            case _:
                return self.plan.resource(self.plan.train_groups[action.train_group].group)
