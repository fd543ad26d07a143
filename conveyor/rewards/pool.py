"""The samples that wait for a reward, and the workers that judge them.

    put ──▶ queue: training, then held-out ──▶ worker: one call for those that wait ──▶ deliver, sample by sample
                                           └─▶ worker: …

A worker is a thread with a function's process, or with a request to a url. What waits is shared out
among the free workers, so that one does not take everything while others stand idle.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from conveyor.config import sections
from conveyor.rewards.client import UrlReward
from conveyor.rewards.process import CallClosed
from conveyor.rewards.scorer import Answer, FunctionReward, Judge

if TYPE_CHECKING:
    from conveyor.types import Rollout

Deliver = Callable[[Answer | Exception], None]
"""Called once, in a worker's thread, with the answer or with what kept the reward from one."""


@dataclass(order=True, slots=True)
class _Waiting:
    later: bool
    """Held-out: judged when no sample of the training waits, and in calls of their own."""
    number: int
    rollout: Rollout = field(compare=False)
    deliver: Deliver = field(compare=False)


class RewardPool:
    """One reward that is a function or a url, with its `workers`."""

    def __init__(
        self, reward: sections.Reward, log: Path | None = None, token: str | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        """Args:
        log: file for what a function prints.
        token, say: see `UrlReward`.
        """
        self._reward = reward
        if reward.url is None:
            self._judges: list[Judge] = [FunctionReward(reward, log) for _ in range(reward.workers)]
        else:
            self._judges = [UrlReward(reward, token, *([] if say is None else [say]))] * reward.workers
        self._threads: list[threading.Thread] = []
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._free = 0
        self._closed = False

    def start(self) -> None:
        """Start the workers and wait until each is ready, which means that it has imported the function.

        Raises:
            UserError: the function cannot be loaded, or the url's token is missing.
        """
        if self._threads:
            return
        with ThreadPoolExecutor(len(self._judges)) as starting:
            for started in [starting.submit(judge.start) for judge in self._judges]:
                started.result()
        for judge in self._judges:
            self._threads.append(threading.Thread(target=self._work, args=(judge,), name=f"reward {self._reward.name}", daemon=True))
            self._threads[-1].start()

    def put(self, samples: Iterable[tuple[Rollout, Deliver]], urgent: bool) -> None:
        """Have samples judged: urgent ones before others, then in order of arrival."""
        with self._changed:
            for rollout, deliver in samples:
                heapq.heappush(self._waiting, _Waiting(not urgent, next(self._numbers), rollout, deliver))
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop what waits. Calls under way go on to their end."""
        with self._changed:
            self._waiting.clear()

    def close(self) -> None:
        """End the workers and their processes. What waits is never delivered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for judge in self._judges:
            judge.close()

    def _work(self, judge: Judge) -> None:
        while batch := self._take():
            unanswered = iter(batch)
            try:
                for answer in judge.answers([waiting.rollout for waiting in batch]):
                    next(unanswered).deliver(answer)
            except CallClosed:
                return
            except Exception as error:  # a RewardError; or a fault of ours, which the driver should see, too
                for waiting in unanswered:
                    waiting.deliver(error)

    def _take(self) -> list[_Waiting]:
        """Samples for one call; none: the pool is closed."""
        with self._changed:
            self._free += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            share = -(-len(self._waiting) // self._free)
            self._free -= 1
            if self._closed:
                return []
            later = self._waiting[0].later
            batch: list[_Waiting] = []
            while self._waiting and self._waiting[0].later == later and len(batch) < min(share, self._reward.batch_size):
                batch.append(heapq.heappop(self._waiting))
            return batch
