"""A rollout engine that samples nothing: each prompt brings its response along, so datasets of responses are scored as a run's are."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar

import ray
import torch

from conveyor.data.completions import Completed
from conveyor.types import Prompt, Rollout
from conveyor.workers.reports import SampleDone, Span, WorkerInfo


class ReplayWorker:
    """The part of RolloutWorker that held-out prompts need, without a model. Start it as an actor whose calls run in threads."""

    max_concurrency: ClassVar[int] = 8
    """`stream` holds one thread for good."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[tuple[SampleDone, Rollout] | None] = queue.SimpleQueue()

    def ready(self) -> WorkerInfo:
        return WorkerInfo("replay", socket.gethostname(), os.getpid(), "none")

    def evaluate(self, prompt: Prompt, n: int, version: int, temperature: float | None = None, greedy: bool = False) -> None:
        """Have the prompt's own response leave through `stream`."""
        assert isinstance(prompt, Completed) and n == 1 and not greedy, "a row has one response"
        now, length = time.time(), len(prompt.response_ids)
        rollout = Rollout(
            prompt=prompt,
            sample=0,
            response_ids=torch.tensor(prompt.response_ids, dtype=torch.int64),
            logprobs=torch.zeros(length),  # nobody knows them
            versions=torch.full((length,), version, dtype=torch.int32),
            finish_reason=prompt.finish_reason,
            text=prompt.completion,
        )
        self._finished.put((SampleDone(rollout.id, length, rollout.truncated, version, version, Span(now, time.time())), rollout))

    @ray.method(num_returns="streaming")
    def stream(self) -> Iterator[tuple[SampleDone, ...] | tuple[Rollout, ...]]:
        """As `RolloutWorker.stream`: what has come since the last item, as reports and then as rollouts. Until `close` or `renew`."""
        finished = self._finished
        while True:
            items = [finished.get()]
            with suppress(queue.Empty):
                while True:
                    items.append(finished.get_nowait())
            leaving = [item for item in items if item is not None]
            if leaving:
                yield tuple(report for report, _ in leaving)
                yield tuple(rollout for _, rollout in leaving)
            if len(leaving) < len(items):
                finished.put(None)  # for a reader who comes after the end
                return

    def renew(self) -> None:
        """Another run begins: what has not left is dropped, and the stream ends."""
        ended, self._finished = self._finished, queue.SimpleQueue()
        ended.put(None)

    def wake(self) -> Span:
        """It never sleeps."""
        return Span(time.time(), time.time())

    def close(self) -> None:
        self._finished.put(None)
