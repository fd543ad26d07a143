"""The executor's side of rewards that are functions or urls: samples go to their worker, and what it says comes back.

Judge ─▶ RewardWorker.judge ─▶ … ─▶ RewardWorker.stream ─▶ books, record ─▶ SampleJudged
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from conveyor.pipeline.actions import Judge, SampleJudged
from conveyor.workers.reports import Judged, Notice

log = logging.getLogger(__name__)


class Judging:
    """`renew` once, then `listen` beside any number of `send`s."""

    def __init__(
        self, rewarder: Any, rollout: Callable[[Judge], Any], note: Callable[[Judged], SampleJudged], tell: Callable[[SampleJudged], None]
    ) -> None:
        """Args:
        rewarder: handle of the RewardWorker.
        rollout: gives the reference of a sample.
        note: enters what is said of a sample into books and record.
        tell: takes the events.
        """
        self._rewarder, self._rollout, self._note, self._tell = rewarder, rollout, note, tell

    async def renew(self) -> None:
        """Another run begins."""
        await self._rewarder.renew.remote()

    async def send(self, judges: Sequence[Judge]) -> None:
        """Samples that came together go together; those of the training before held-out ones."""
        for urgent in (True, False):
            rollouts = [self._rollout(judge) for judge in judges if (judge.version is None) == urgent]
            if rollouts:
                await self._rewarder.judge.remote(rollouts, urgent)

    async def listen(self) -> None:
        """What functions and urls say, as it becomes known; until it is cancelled."""
        async for reference in self._rewarder.stream.remote():
            for told in await reference:
                if isinstance(told, Notice):
                    log.warning("%s", told.text)
                else:
                    self._tell(self._note(told))
        raise RuntimeError("the worker of reward functions ended its stream before the run was over")
