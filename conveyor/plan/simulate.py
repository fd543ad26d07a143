"""The simulator: the run's own scheduler on a virtual clock.

    Scheduler ── actions ──▶ a heap of (time, what happens then) ── event ──▶ Scheduler

What may start, and when, is decided by the very class that decides it in a run; only how long tasks take is modelled
(`costs.py`, `engines.py`). The events written are those of a run, so a plan and a run are measured by the same code. Things that
happen at the same moment are all told to the scheduler before it is asked what may start.

Rewards that are functions or urls judge any number of samples at once, each for as long as its cost says. Which groups have equal
rewards, and so are left out by dynamic sampling, is the workload's to say.

Left out: evaluations, which give way to everything else (`plan.evaluation` has to be None), and that the actor is not trained in the
first steps of `train.critic_warmup_steps`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from conveyor.pipeline.actions import (
    Admit,
    Checkpoint,
    Done,
    Drop,
    Finish,
    HandOver,
    InstallEngine,
    InstallSnapshot,
    Judge,
    Prepare,
    Publish,
    SampleFinished,
    SampleJudged,
    Score,
    Train,
    Update,
)
from conveyor.pipeline.actions import Event as Happening
from conveyor.pipeline.run_plan import RunPlan
from conveyor.pipeline.scheduler import REWARDS, Scheduler
from conveyor.plan.costs import CostModel, installed_roles
from conveyor.plan.engines import Engine
from conveyor.plan.lengths import Workload
from conveyor.report.events import JUDGE, Event
from conveyor.report.timeline import Window, step_idle, step_windows
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey

SNAPSHOT_ROLES = {"policy_snapshot": "actor", "critic_snapshot": "critic"}


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did. Steps are counted from 1, as in events.jsonl."""

    plan: RunPlan
    events: list[Event]

    @cached_property
    def windows(self) -> dict[int, Window]:
        return step_windows(self.events)

    @cached_property
    def step_seconds(self) -> dict[int, float]:
        return {step: end - start for step, (start, end) in self.windows.items()}

    @cached_property
    def idle(self) -> dict[int, dict[str, float]]:
        """step → device group → idle share of its window."""
        return {step: step_idle(self.events, window) for step, window in self.windows.items()}

    def steady(self) -> Steady:
        """The pace between the steps in which the pipeline fills and those in which it runs empty."""
        staleness = self.plan.max_staleness
        return steady(self.events, first=staleness + 1, last=staleness)


@dataclass(frozen=True)
class Steady:
    """The pace of a run, averaged over time."""

    step_seconds: float
    idle: dict[str, float]
    """Device group → idle share."""


def steady(events: Sequence[Event], first: int, last: int = 0) -> Steady:
    """Of a run or a simulation, without its `first` and `last` steps; where that leaves none, of the last step."""
    windows = step_windows(events)
    kept = sorted(windows)[first : len(windows) - last] or [max(windows)]
    window = (windows[kept[0]][0], windows[kept[-1]][1])
    return Steady((window[1] - window[0]) / len(kept), step_idle(events, window))


def simulate(plan: RunPlan, costs: CostModel, workload: Workload, ranks: Mapping[str, int] | None = None) -> Simulation:
    """Run a plan to its end.

    Args:
        workload: sizes of all samples of the plan's steps.
        ranks: device group → ranks of a train group on it, each busy with each of its tasks; default 1.
    """
    return _Simulator(plan, costs, workload, dict(ranks or {})).run()


class _Simulator:
    def __init__(self, plan: RunPlan, costs: CostModel, workload: Workload, ranks: dict[str, int]) -> None:
        self.plan, self.costs, self.workload = plan, costs, workload
        self.scheduler = Scheduler(plan)
        self.now = 0.0
        self.events: list[Event] = []
        self._heap: list[tuple[float, int, Happening | int]] = []
        """(when, number, what happens): an event for the scheduler, or the number of an engine that finishes samples then."""
        self._count = 0
        self._engines: list[Engine] = [costs.engine.start() for _ in range(plan.engines)]
        self._wakes: list[float | None] = [None] * plan.engines
        self._versions = [plan.start_step] * plan.engines
        self._admitted: dict[SampleId, tuple[float, int]] = {}
        """Sample → when it was admitted, version."""
        self._unplaced: dict[int, list[Event]] = defaultdict(list)
        """Group whose step is not known yet → events of its samples."""
        self._line_free: dict[tuple[int, bool], float] = defaultdict(float)
        self._workers = [[_names("train", group.group, rank) for rank in range(ranks.get(group.group, 1))] for group in plan.train_groups]
        self._engine_names = [_names("rollout", plan.rollout_group, number) for number in range(plan.engines)]
        snapshots = {role for part in plan.parts for role in part.roles}
        self._published_roles = {"actor", *(trained for role, trained in SNAPSHOT_ROLES.items() if role in snapshots)}
        self._start: dict[type, Callable[[Any], float]] = {
            Score: self._score,
            InstallEngine: self._install_engine,
            InstallSnapshot: self._install_snapshot,
            Prepare: self._prepare,
            Train: self._train,
            Update: self._update,
            Publish: self._publish,
            Checkpoint: self._checkpoint,
            Finish: self._finish,
            HandOver: self._hand_over,
        }

    def run(self) -> Simulation:
        self._launch()
        while not self.scheduler.finished:
            assert self._heap, "deadlock: nothing is running and the run is not finished"
            self.now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self.now:
                self._happen(heapq.heappop(self._heap)[2])
            self._launch()
        return Simulation(self.plan, self.events)

    def _happen(self, what: Happening | int) -> None:
        if not isinstance(what, int):
            self.scheduler.handle(what)
            if isinstance(what, SampleJudged) and self.plan.groups_sampled_at_most is not None:
                self._place(*self._unplaced)
            return
        # Admissions and installs move an engine's next finish; wake-ups set before that are void.
        if self._wakes[what] == self.now:
            for sample in self._engines[what].finish():
                self._sample_finished(what, sample)
            self._wakes[what] = None
            self._set_wake(what)

    def _launch(self) -> None:
        touched: set[int] = set()
        for action in self.scheduler.actions():
            if isinstance(action, Admit):
                self._admit(action)
                touched.add(action.engine)
                continue
            if isinstance(action, Judge):
                self._judge(action)
                continue
            if isinstance(action, Drop):
                self._write(action.group, action.step)
                continue
            self._push(self._start[type(action)](action), Done(action))
            if isinstance(action, InstallEngine):
                touched.add(action.engine)
        for engine in sorted(touched):
            self._set_wake(engine)

    def _push(self, when: float, what: Happening | int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, what))

    def _set_wake(self, engine: int) -> None:
        due = self._engines[engine].next_finish()
        if due is not None and due != self._wakes[engine]:
            self._push(due, engine)
        self._wakes[engine] = due

    # ── rollout ──────────────────────────────────────────────────────────────────────────────────

    def _admit(self, action: Admit) -> None:
        when = self.now + self.costs.latency
        samples = [SampleId(action.group, number) for number in range(self.plan.samples_per_group)]
        self._engines[action.engine].admit([(sample, self.workload.size(sample)) for sample in samples], when)
        for sample in samples:
            self._admitted[sample] = (when, self._versions[action.engine])

    def _sample_finished(self, engine: int, sample: SampleId) -> None:
        start, version = self._admitted.pop(sample)
        worker, device = self._engine_names[engine]
        group, newest, name = self.plan.rollout_group, self._versions[engine], (sample.group, sample.sample)
        self._unplaced[sample.group].append(Event(group, worker, "rollout", "rollout", 0, None, newest, start, self.now, device, (name,)))
        self.scheduler.handle(SampleFinished(engine, sample, version))
        self._place(sample.group)

    def _place(self, *groups: int) -> None:
        """Write the events of groups whose step is known."""
        for group in groups:
            if (step := self.scheduler.membership.step_of(group)) is not None:
                self._write(group, step)

    def _write(self, group: int, step: int) -> None:
        self.events += [replace(event, step=step + 1) for event in self._unplaced.pop(group, ())]

    def _install_engine(self, action: InstallEngine) -> float:
        start, end = self._engines[action.engine].install(self.costs.install_engine(), self.now + self.costs.latency)
        self._versions[action.engine] = action.version
        worker, device = self._engine_names[action.engine]
        group, version = self.plan.rollout_group, action.version
        self.events.append(Event(group, worker, "rollout", "install", version, None, version, start, end, device))
        return end

    # ── score ────────────────────────────────────────────────────────────────────────────────────

    def _judge(self, action: Judge) -> None:
        sample = action.sample
        start = self.now + self.costs.latency
        end = start + self.costs.judge(sample)
        equal = self.plan.groups_sampled_at_most is not None and self.workload.equal(sample.group)
        worker, device = _names(REWARDS, REWARDS, 0)
        self._unplaced[sample.group].append(
            Event(REWARDS, worker, REWARDS, JUDGE, 0, None, None, start, end, device, ((sample.group, sample.sample),))
        )
        self._place(sample.group)
        self._push(end, SampleJudged(sample, equal=equal))

    def _on_scorer(self, number: int, worker: int, role: str, task: str, seconds: float, step: int, **more: int) -> float:
        part = self.plan.parts[number]
        name, device = _names("score", part.group, worker)
        start = self.now + self.costs.latency
        version, micro_batch = more["version"], more.get("micro_batch")
        self.events.append(Event(part.group, name, role, task, step, micro_batch, version, start, start + seconds, device))
        return start + seconds

    def _score(self, action: Score) -> float:
        part, key = self.plan.parts[action.part], action.key
        seconds = self.costs.score(part, self.workload.sizes(action.samples))
        place = {"version": key.step, "micro_batch": self._number(key)}
        return self._on_scorer(action.part, action.worker, "+".join(part.roles), "score", seconds, key.step + 1, **place)

    def _install_snapshot(self, action: InstallSnapshot) -> float:
        part, version = self.plan.parts[action.part], action.version
        roles = "+".join(installed_roles(part))
        seconds = self.costs.install_snapshot(part)
        return self._on_scorer(action.part, action.worker, roles, "install", seconds, version, version=version)

    # ── train ────────────────────────────────────────────────────────────────────────────────────

    def _on_line(
        self,
        number: int,
        task: str | None,
        seconds: float,
        step: int,
        *,
        micro_batch: int | None = None,
        samples: Sequence[SampleId] = (),
        ranks: int | None = None,
    ) -> float:
        """Ranks do one call after the other, in the order they were sent; returns when this one is done.

        Args:
            samples: dealt out to the ranks in turn, as in a run.
            ranks: those that record it; None: all.
        """
        thread = number, task == "prepare"  # which has a thread of its own
        start = max(self.now + self.costs.latency, self._line_free[thread])
        self._line_free[thread] = end = start + seconds
        if task is not None:
            group, workers = self.plan.train_groups[number], self._workers[number]
            role, names = "+".join(group.roles), [(sample.group, sample.sample) for sample in samples]
            for rank, (worker, device) in enumerate(workers[:ranks]):
                share = tuple(names[rank :: len(workers)])
                self.events.append(Event(group.group, worker, role, task, step + 1, micro_batch, step, start, end, device, share))
        return end

    def _prepare(self, action: Prepare) -> float:
        seconds = self.costs.prepare(self.plan.train_groups[action.train_group], self.workload.sizes(action.samples))
        return self._on_line(
            action.train_group, "prepare", seconds, action.key.step, micro_batch=self._number(action.key), samples=action.samples
        )

    def _train(self, action: Train) -> float:
        seconds = self.costs.train(self.plan.train_groups[action.train_group], self.workload.sizes(action.samples))
        return self._on_line(action.train_group, "train", seconds, action.key.step, micro_batch=self._number(action.key))

    def _update(self, action: Update) -> float:
        seconds = self.costs.update(self.plan.train_groups[action.train_group])
        return self._on_line(action.train_group, "update", seconds, action.step)

    def _publish(self, action: Publish) -> float:
        """A model that neither an engine nor a snapshot holds is not published."""
        group = self.plan.train_groups[action.train_group]
        if self._published_roles.isdisjoint(group.roles):
            return self.now
        return self._on_line(action.train_group, "publish", self.costs.publish(group), action.version - 1, ranks=1)

    def _checkpoint(self, action: Checkpoint) -> float:
        seconds = self.costs.checkpoint(self.plan.train_groups[action.train_group])
        return self._on_line(action.train_group, "checkpoint", seconds, action.step - 1, ranks=1)

    def _hand_over(self, action: HandOver) -> float:
        """The leaving workers sleep, then the coming ones wake."""
        start = self.now + self.costs.latency
        for task, stage in (("sleep", action.leaving), ("wake", action.coming)):
            end = start + self.costs.move(action.group, stage)
            step = action.step(self.scheduler.version)
            for name, device in self._workers_of(action.group, stage):
                self.events.append(Event(action.group, name, stage, task, step + 1, None, step, start, end, device))
            start = end
        return start

    def _workers_of(self, group: str, stage: str) -> list[tuple[str, str]]:
        """(worker, device)"""
        if stage == "rollout":
            return self._engine_names
        if stage == "score":
            count = next(count for part, count in zip(self.plan.parts, self.plan.part_workers, strict=True) if part.group == group)
            return [_names("score", group, number) for number in range(count)]
        lines = zip(self.plan.train_groups, self._workers, strict=True)
        return next(workers for line, workers in lines if line.group == group)

    def _finish(self, action: Finish) -> float:
        seconds = self.costs.finish(self.plan.train_groups[action.train_group])
        return self._on_line(action.train_group, None, seconds, action.step, ranks=0)

    def _number(self, key: MicroBatchKey) -> int:
        """Micro-batches are counted through the updates of their step, as in a run's events."""
        return key.update * -(-self.plan.samples_per_update // self.plan.micro_batch_size) + key.number


def _names(stage: str, group: str, index: int) -> tuple[str, str]:
    """(worker, device) as a run's events name them."""
    return (f"{stage} {index}" if stage == group else f"{stage} {group} {index}"), f"{group} {index}"
