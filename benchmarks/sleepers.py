"""Ray actors with the faces of Conveyor's workers whose tasks only sleep.

The driver's side is the real one (Scheduler, Executor, Ledger, Recorder); the records, their number and the way they travel are
those of a run: an engine streams a SampleDone and a Rollout a sample, score workers and train ranks fetch what they are
given. What a run takes longer than its sleeps is therefore the framework's own time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch

from conveyor.algorithms.metrics import Mean
from conveyor.types import PartialScores, Prompt, Rollout, SampleId
from conveyor.workers.records import fetch, fetch_rollouts
from conveyor.workers.reports import (
    InstallReport,
    OptimReport,
    PrepareReport,
    Publication,
    SampleDone,
    SampleReport,
    SampleRow,
    ScoreReport,
    Span,
    StepReport,
    TrainReport,
)
from conveyor.workers.start import Workers

TOKENS = 32
"""Of every response: what travels is small, as responses are beside weights."""


@dataclass(frozen=True, slots=True)
class Sleeps:
    """Seconds of every task."""

    rollout: Mapping[SampleId, float]
    """From admission to the last token, whatever else the engine does."""
    score: float
    train: float
    """Of a micro-batch, on all ranks at once."""
    update: float
    publish: float
    install: float


class Engine:
    def __init__(self) -> None:
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[Any] = asyncio.Queue()

    async def set_sleeps(self, sleeps: Sleeps) -> None:
        self._sleeps, self._version = sleeps, 0

    async def renew(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._finished.put_nowait(None)
        self._finished = asyncio.Queue()

    async def submit(self, prompt: Prompt, n: int, greedy: bool = False) -> None:
        assert not greedy, "no recipe here has a greedy baseline"
        for sample in range(n):
            task = asyncio.get_running_loop().create_task(self._sample(prompt, sample))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, prompt: Prompt, sample: int) -> None:
        start, version = time.time(), self._version
        name = SampleId(prompt.index, sample)
        await asyncio.sleep(self._sleeps.rollout[name])
        versions = torch.full((TOKENS,), version, dtype=torch.int32)
        ids, logprobs = torch.ones(TOKENS, dtype=torch.int64), torch.zeros(TOKENS)
        done = SampleDone(name, TOKENS, False, version, self._version, Span(start, time.time()))
        self._finished.put_nowait((done, Rollout(prompt, sample, ids, logprobs, versions, "stop", "text")))

    @ray.method(num_returns="streaming")
    async def stream(self) -> AsyncIterator[Any]:
        finished = self._finished
        while (item := await finished.get()) is not None:
            leaving = [item]
            while not finished.empty():
                if (more := finished.get_nowait()) is None:
                    finished.put_nowait(None)
                    break
                leaving.append(more)
            yield tuple(done for done, _ in leaving)
            yield tuple(rollout for _, rollout in leaving)

    async def install(self, publication: Publication) -> InstallReport:
        start = time.time()
        await asyncio.sleep(self._sleeps.install)
        self._version = publication.version
        return InstallReport(publication.version, 0, Span(start, time.time()))


class Scorer:
    def set_sleeps(self, sleeps: Sleeps) -> None:
        self._sleeps = sleeps

    def score(self, roles: Sequence[str], rollouts: Sequence[Any]) -> tuple[ScoreReport, PartialScores]:
        start = time.time()
        samples = fetch_rollouts(rollouts)
        time.sleep(self._sleeps.score)
        return ScoreReport(Span(start, time.time())), PartialScores(rewards=dict.fromkeys(roles, (1.0,) * len(samples)))


class Rank:
    concurrency_groups: ClassVar = {"prepare": 1}  # as TrainWorker's; importing that here would make sleepers slow to start

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._rows: dict[int, list[SampleRow]] = {}

    def set_sleeps(self, sleeps: Sleeps) -> None:
        self._sleeps = sleeps

    @ray.method(concurrency_group="prepare")
    def prepare(self, key: Any, rollouts: Sequence[Any], scores: Sequence[Any], settings: Any) -> PrepareReport:
        start = time.time()
        samples, parts = fetch_rollouts(rollouts), fetch(scores)
        rewards = {name: values[0] for part in parts for name, values in part.rewards.items()}
        mine = samples[self._rank :: self._ranks]
        reports = tuple(
            SampleReport(s.id, rewards, 1.0, 1.0, 0.0, TOKENS, TOKENS, False, int(s.versions[0]), int(s.versions.sum())) for s in mine
        )
        self._rows.setdefault(key.step, []).extend(
            SampleRow(
                s.id, s.prompt.text, s.text, rewards, 1.0, 0.0, key.step, s.finish_reason, len(s.prompt.token_ids), len(s.response_ids)
            )
            for s in mine
        )
        return PrepareReport(key, reports, Span(start, time.time()))

    def forward_backward(self, key: Any, shared: Any, last: bool) -> TrainReport:
        start = time.time()
        time.sleep(self._sleeps.train)
        return TrainReport({"loss/policy": Mean(1.0, 1.0)}, Span(start, time.time()))

    def optim_step(self, denominators: Any) -> OptimReport:
        start = time.time()
        time.sleep(self._sleeps.update)
        return OptimReport({"actor": StepReport(1.0, 1e-3)}, Span(start, time.time()))

    def publish(self, version: int, role: str) -> Publication | None:
        start = time.time()
        time.sleep(self._sleeps.publish)
        return Publication(version, role, (), None, 0, Span(start, time.time())) if self._rank == 0 else None

    def finish_step(self, step: int) -> list[SampleRow]:
        return self._rows.pop(step, [])


def start(engines: int, scorers: int, ranks: int) -> Workers:
    """Start sleepers; they need no core. Ray is initialised."""

    def actor(cls: type, *arguments: Any) -> Any:
        groups = getattr(cls, "concurrency_groups", None)
        remote: Any = ray.remote
        made = remote(cls) if groups is None else remote(concurrency_groups=groups)(cls)
        return made.options(num_cpus=0).remote(*arguments)

    return Workers(
        [actor(Engine) for _ in range(engines)],
        {"score": [actor(Scorer) for _ in range(scorers)]},
        [[actor(Rank, rank, ranks) for rank in range(ranks)]],
    )


def set_sleeps(workers: Workers, sleeps: Sleeps) -> None:
    every = [*workers.engines, *workers.scorers["score"], *workers.trainers[0]]
    ray.get([worker.set_sleeps.remote(sleeps) for worker in every])
