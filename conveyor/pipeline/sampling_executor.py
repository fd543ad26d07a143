"""Carries out what held-out prompts need: the part of the executor that `Sampler` and a training share.

    Scheduler ── actions ──▶ one asyncio task each ──▶ Ray actor ── report ──▶ event ──▶ Scheduler

The executor decides nothing: what may start, and when, is the scheduler's. Every report becomes an
event for the scheduler and one in the record of the run. An exception of any worker ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from conveyor.pipeline.actions import (
    Action,
    Admit,
    CloseEvaluation,
    Done,
    Drop,
    Evaluate,
    EvaluationSampled,
    Event,
    HandOver,
    Judge,
    SampleJudged,
    ScoreEvaluation,
)
from conveyor.pipeline.asking import Asking
from conveyor.pipeline.event_record import EventRecord, Place
from conveyor.pipeline.judging import Judging
from conveyor.pipeline.scheduler import Scheduler
from conveyor.types import Prompt, SampleId
from conveyor.workers.failures import Who, failure
from conveyor.workers.records import RolloutRef
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone, Span
from conveyor.workers.start import Workers

JUDGES = Who("rewards", "rewards", 0)


class HeldOutPrompts(Protocol):
    """The prompts of a run's evaluation, each named by its place, and the books of their samples. Rollouts are references."""

    async def admitted(self, action: Evaluate) -> None:
        """Returns when the prompt may be sampled."""

    def submission(self, action: Evaluate) -> tuple[Prompt, int, int, float | None, bool]:
        """Arguments of `RolloutWorker.evaluate`."""

    def sampled(self, engine: int, done: SampleDone, rollout: Any) -> EvaluationSampled: ...

    def aborted(self, engine: int, sample: EvaluationAborted) -> EvaluationSampled: ...

    def rollouts(self, action: ScoreEvaluation) -> list[Any]:
        """The samples to be scored, prompt by prompt."""

    def rollout(self, version: int, sample: SampleId) -> Any:
        """One; its group is −1 − the prompt's place."""

    def judged(self, judged: Judged) -> SampleJudged: ...

    def scored(self, action: ScoreEvaluation, rewards: Mapping[str, Sequence[float | None]]) -> None:
        """`rewards`: name → one number a sample, in the order of `rollouts`."""


class SamplingExecutor:
    """One run of a scheduler on a set of workers. `await run()` once."""

    held_out: HeldOutPrompts
    recorder: EventRecord

    def __init__(
        self, scheduler: Scheduler, workers: Workers, held_out: HeldOutPrompts, recorder: EventRecord, timeout: float = math.inf
    ) -> None:
        """timeout: seconds for one task of a worker (`ray.timeout`)."""
        self.scheduler, self.workers, self.held_out, self.recorder = scheduler, workers, held_out, recorder
        self.plan = scheduler.plan
        self.asking = Asking(timeout, self._what_is_left)
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        rewarder = workers.rewarder
        self.judging = None if rewarder is None else Judging(rewarder, self._to_judge, self._judged, self._events.put_nowait)
        self._tasks: set[asyncio.Task[None]] = set()
        self._carry_out: dict[type, Callable[[Any], Awaitable[None]]] = {
            Evaluate: self._evaluate,
            ScoreEvaluation: self._score_evaluation,
            CloseEvaluation: self._close_evaluation,
            HandOver: self._hand_over,
        }

    async def run(self) -> None:
        """Until the scheduler has finished. Raises the first exception of any worker."""
        await self.asking.all(
            [(self._engine(number), engine.renew.remote()) for number, engine in enumerate(self.workers.engines)], "renew"
        )
        for number in range(self.plan.engines):
            self._spawn(self._guarded(self._listen(number), self._engine(number)))
        if self.judging is not None:
            await self.judging.renew()
            self._spawn(self._guarded(self.judging.listen(), JUDGES))
        try:
            self._launch()
            while not self.scheduler.finished:
                self._handle(await self._events.get())
                while not self._events.empty():
                    self._handle(self._events.get_nowait())
                self._launch()
            for action in self.scheduler.awake.way_home():
                await self._hand_over(action)
        finally:
            for task in self._tasks:
                task.cancel()

    def _handle(self, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            raise event
        self.scheduler.handle(event)

    def _launch(self) -> None:
        judges: list[Judge] = []
        for action in self.scheduler.actions():
            if isinstance(action, Judge):
                judges.append(action)
            else:
                self._spawn(self._run_one(action))
        if judges:
            assert self.judging is not None
            self._spawn(self._guarded(self.judging.send(judges), JUDGES))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_one(self, action: Action) -> None:
        if await self._guarded(self._carry_out[type(action)](action)) and not isinstance(action, (Admit, Evaluate, Drop)):
            self._events.put_nowait(Done(action))

    async def _guarded(self, work: Awaitable[None], of: Who | None = None) -> bool:
        """Whether the work was done; an exception ends the run. `of`: whose it is; default: it asks (`Asking`)."""
        try:
            await work
        except Exception as error:
            self._events.put_nowait(error if of is None else failure(of, error, self._what_is_left()))
        else:
            return True
        return False

    def _engine(self, number: int) -> Who:
        return Who("rollout", self.plan.rollout_group, number)

    def _scorer(self, part: int, worker: int) -> Who:
        return Who("score", self.plan.parts[part].group, worker)

    def _ask_engine(self, number: int, method: str, *arguments: Any) -> Awaitable[Any]:
        return self.asking.one(self._engine(number), method, getattr(self.workers.engines[number], method).remote(*arguments))

    def _what_is_left(self) -> str:
        """Of a run that a dead worker has ended."""
        return ""

    # ── samples ──────────────────────────────────────────────────────────────────────────────────

    async def _evaluate(self, action: Evaluate) -> None:
        await self.held_out.admitted(action)
        await self._ask_engine(action.engine, "evaluate", *self.held_out.submission(action))

    async def _listen(self, number: int) -> None:
        """Samples leave an engine as they finish: small reports, then the reference of their rollouts."""
        stream = self.workers.engines[number].stream.remote()
        async for reference in stream:
            reports, bundle = await reference, await anext(stream)
            places = itertools.count()
            for report in reports:
                aborted = isinstance(report, EvaluationAborted)
                self._events.put_nowait(self._left_engine(number, report, None if aborted else RolloutRef(bundle, next(places))))
        raise RuntimeError(f"rollout engine {number} ended its stream before the run was over")

    def _left_engine(self, engine: int, report: SampleDone | EvaluationAborted, rollout: RolloutRef | None) -> Event:
        if isinstance(report, EvaluationAborted):
            self.recorder.evaluated(engine, report.version, report.span)
            return self.held_out.aborted(engine, report)
        self.recorder.evaluated(engine, report.oldest_version, report.span)
        return self.held_out.sampled(engine, report, rollout)

    # ── scores ───────────────────────────────────────────────────────────────────────────────────

    def _to_judge(self, action: Judge) -> Any:
        assert action.version is not None
        return self.held_out.rollout(action.version, action.sample)

    def _judged(self, judged: Judged) -> SampleJudged:
        self.recorder.judged_held_out(judged)
        return self.held_out.judged(judged)

    async def _score_evaluation(self, action: ScoreEvaluation) -> None:
        part = self.plan.parts[action.part]
        worker = self.workers.scorers[part.group][action.worker]
        report, scores = worker.score.options(num_returns=2).remote(part.rewards, self.held_out.rollouts(action))
        done = await self.asking.one(self._scorer(action.part, action.worker), "score", report)
        rewards = (await scores).rewards
        self.recorder.scored_evaluation(part, action.worker, action.version, done)
        self.held_out.scored(action, rewards)

    async def _close_evaluation(self, action: CloseEvaluation) -> None:
        """The round is over: everything has come."""

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    async def _hand_over(self, action: HandOver) -> None:
        """The leaving workers give their memory back before the coming ones ask for it."""
        for task, stage in (("sleep", action.leaving), ("wake", action.coming)):
            step = action.step(self.scheduler.version)
            await asyncio.gather(*(self._move(task, who, worker, step) for who, worker in self._workers_of(action.group, stage)))

    async def _move(self, task: str, who: Who, worker: Any, step: int) -> None:
        start = time.time()
        await self.asking.one(who, task, getattr(worker, task).remote())
        self.recorder.moved(Place(who.stage, who.group, who.index), task, step, Span(start, time.time()))

    def _workers_of(self, group: str, stage: str) -> list[tuple[Who, Any]]:
        if stage == "rollout":
            return [(self._engine(number), engine) for number, engine in enumerate(self.workers.engines)]
        if stage == "score":
            return [(Who("score", group, number), worker) for number, worker in enumerate(self.workers.scorers[group])]
        of_group = [ranks for line, ranks in zip(self.plan.train_groups, self.workers.trainers, strict=True) if line.group == group]
        return [(Who("train", group, rank), worker) for ranks in of_group for rank, worker in enumerate(ranks)]
