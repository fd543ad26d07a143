"""Carries out what held-out prompts need: the part of the executor that `Sampler` and a training share.

    Scheduler ── actions ──▶ one asyncio task each ──▶ Ray actor ── report ──▶ event ──▶ Scheduler

The executor decides nothing: what may start, and when, is the scheduler's. Every report becomes an
event for the scheduler and one in the record of the run. An exception of any worker ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayActorError

from conveyor.config import RunError
from conveyor.pipeline.actions import (
    Action,
    Admit,
    CloseEvaluation,
    Done,
    Drop,
    Evaluate,
    EvaluationSampled,
    Event,
    Judge,
    SampleJudged,
    ScoreEvaluation,
)
from conveyor.pipeline.event_record import EventRecord
from conveyor.pipeline.judging import Judging
from conveyor.pipeline.scheduler import Scheduler
from conveyor.types import Prompt, SampleId
from conveyor.workers.records import RolloutRef
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone
from conveyor.workers.start import Workers


class WorkerDied(RunError):
    """A worker's process has ended; says which, and what is left of the run."""


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

    def __init__(self, scheduler: Scheduler, workers: Workers, held_out: HeldOutPrompts, recorder: EventRecord) -> None:
        self.scheduler, self.workers, self.held_out, self.recorder = scheduler, workers, held_out, recorder
        self.plan = scheduler.plan
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        rewarder = workers.rewarder
        self.judging = None if rewarder is None else Judging(rewarder, self._to_judge, self._judged, self._events.put_nowait)
        self._tasks: set[asyncio.Task[None]] = set()
        self._carry_out: dict[type, Callable[[Any], Awaitable[None]]] = {
            Evaluate: self._evaluate,
            ScoreEvaluation: self._score_evaluation,
            CloseEvaluation: self._close_evaluation,
        }

    async def run(self) -> None:
        """Until the scheduler has finished. Raises the first exception of any worker."""
        await asyncio.gather(*(engine.renew.remote() for engine in self.workers.engines))
        for number in range(self.plan.engines):
            self._spawn(self._guarded(self._listen(number), f"rollout engine {number}"))
        if self.judging is not None:
            await self.judging.renew()
            self._spawn(self._guarded(self.judging.listen(), "the worker of reward functions"))
        try:
            self._launch()
            while not self.scheduler.finished:
                self._handle(await self._events.get())
                while not self._events.empty():
                    self._handle(self._events.get_nowait())
                self._launch()
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
            self._spawn(self._guarded(self.judging.send(judges), "the worker of reward functions"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_one(self, action: Action) -> None:
        if await self._guarded(self._carry_out[type(action)](action), action) and not isinstance(action, (Admit, Evaluate, Drop)):
            self._events.put_nowait(Done(action))

    async def _guarded(self, work: Awaitable[None], of: Action | str) -> bool:
        """Whether the work was done; an exception ends the run. `of`: an action, or the name of the worker that does it."""
        try:
            await work
        except RayActorError:
            worker = of if isinstance(of, str) else self._worker_of(of)
            self._events.put_nowait(WorkerDied(f"{worker} died, killed or out of memory{self._what_is_left()}"))
        except Exception as error:
            self._events.put_nowait(error)
        else:
            return True
        return False

    def _worker_of(self, action: Action) -> str:
        match action:
            case Evaluate(engine, _, _):
                return f"rollout engine {engine}"
            case ScoreEvaluation(part, worker, _, _):
                return f"score worker {worker} of group {self.plan.parts[part].group}"
            case _:
                raise AssertionError("runs on no worker that is asked here")

    def _what_is_left(self) -> str:
        """Of a run that a dead worker has ended."""
        return ""

    # ── samples ──────────────────────────────────────────────────────────────────────────────────

    async def _evaluate(self, action: Evaluate) -> None:
        await self.held_out.admitted(action)
        await self.workers.engines[action.engine].evaluate.remote(*self.held_out.submission(action))

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
        rewards = (await scores).rewards
        self.recorder.scored_evaluation(part, action.worker, action.version, await report)
        self.held_out.scored(action, rewards)

    async def _close_evaluation(self, action: CloseEvaluation) -> None:
        """The round is over: everything has come."""
