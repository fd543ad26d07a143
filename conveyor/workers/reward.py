"""Rewards that are functions or urls: every sample is judged as soon as it has left its engine.

    judge ──▶ a pool a reward (rewards/pool.py) ──▶ stream: samples whose rewards have all come

It needs no device and runs beside everything else, so a slow judge does not stop the engines.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import ray

from conveyor.config import sections
from conveyor.rewards.pool import RewardPool
from conveyor.rewards.scorer import Answer
from conveyor.types import Rollout
from conveyor.workers.records import RolloutRef, fetch_rollouts
from conveyor.workers.reports import Judged, Notice, Span, WorkerInfo

_Leaving = queue.SimpleQueue[Judged | Notice | Exception | None]
"""What goes to the stream of one run; None ends it."""


@dataclass(slots=True)
class _Sample:
    """A sample some of whose rewards have not come."""

    rollout: Rollout
    start: float
    leaving: _Leaving
    answers: dict[str, Answer] = field(default_factory=dict)


class RewardWorker:
    """Judges samples. Start it as an actor whose calls run in threads (`max_concurrency`)."""

    max_concurrency: ClassVar[int] = 8
    """`stream` holds one thread for good; `judge` may wait for samples on their way."""

    def __init__(self, rewards: tuple[sections.Reward, ...], log: Path, tokens: Mapping[str, str] | None = None) -> None:
        """Args:
        rewards: those that are functions or urls, in the recipe's order.
        log: file for what functions print.
        tokens: by reward, the driver's: on a cluster this process has another environment.
        """
        assert all(reward.judged for reward in rewards)
        self._leaving: _Leaving = queue.SimpleQueue()
        known = tokens or {}
        self._pools = {reward.name: RewardPool(reward, log, known.get(reward.name), self._say) for reward in rewards}
        self._lock = threading.Lock()  # guards every sample's answers

    def ready(self) -> WorkerInfo:
        """Starts the processes of all functions.

        Raises:
            UserError: a function that cannot be loaded, a token that is missing.
        """
        for pool in self._pools.values():
            pool.start()
        return WorkerInfo("reward", socket.gethostname(), os.getpid(), "none")

    def judge(self, rollouts: Sequence[RolloutRef | Rollout], urgent: bool = True) -> None:
        """Queue samples; each leaves through `stream` once. `urgent`: before those that are not, which are held-out ones.

        A sample whose turns failed has None from every reward, which are not asked.
        """
        start, leaving = time.time(), self._leaving
        samples = [_Sample(rollout, start, leaving) for rollout in fetch_rollouts(rollouts)]
        to_judge = [sample for sample in samples if sample.rollout.failure is None and self._pools]
        for sample in samples:
            if sample.rollout.failure is not None or not self._pools:
                leaving.put(self._judged(sample))
        for name, pool in self._pools.items():
            pool.put([(sample.rollout, partial(self._take, sample, name)) for sample in to_judge], urgent)

    @ray.method(num_returns="streaming")
    def stream(self) -> Iterator[tuple[Judged | Notice, ...]]:
        """Samples all of whose rewards have come since the last item, and what the user should read. Until `close` or `renew`.

        Raises:
            RewardError: a reward failed that the recipe does not let fail; names the row, or what the server said.
        """
        leaving = self._leaving
        while True:
            items = [leaving.get()]
            with suppress(queue.Empty):
                while True:
                    items.append(leaving.get_nowait())
            ends = [item for item in items if not isinstance(item, Judged | Notice)]
            if told := tuple(item for item in items if isinstance(item, Judged | Notice)):
                yield told
            if ends:
                leaving.put(ends[0])  # for a reader who comes after the end
                if ends[0] is not None:
                    raise ends[0]
                return

    def renew(self) -> None:
        """Another run begins: what is queued is dropped, what is being judged never leaves, and the stream ends."""
        ended, self._leaving = self._leaving, queue.SimpleQueue()
        for pool in self._pools.values():
            pool.forget()
        ended.put(None)

    def close(self) -> None:
        """Ends the stream and the processes (which also end with the worker)."""
        for pool in self._pools.values():
            pool.close()
        self._leaving.put(None)

    def _say(self, text: str) -> None:
        self._leaving.put(Notice(text))

    def _take(self, sample: _Sample, name: str, answer: Answer | Exception) -> None:
        """A reward has answered; called in a thread of its pool."""
        if isinstance(answer, Exception):
            sample.leaving.put(answer)
            return
        with self._lock:
            sample.answers[name] = answer
            complete = len(sample.answers) == len(self._pools)
        if complete:
            sample.leaving.put(self._judged(sample))

    def _judged(self, sample: _Sample) -> Judged:
        answers = {name: sample.answers.get(name, Answer(None)) for name in self._pools}
        return Judged(
            id=sample.rollout.id,
            version=int(sample.rollout.versions[0]),
            rewards={name: answer.score for name, answer in answers.items()},
            timeouts=sum(answer.lost == "timeout" for answer in answers.values()),
            errors=sum(answer.lost == "error" for answer in answers.values()),
            span=Span(sample.start, time.time()),
        )
