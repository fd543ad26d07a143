"""The executor's side of rewards that are functions or urls: samples go to their worker, and what it says comes back.

Judge ─▶ RewardWorker.judge ─▶ … ─▶ RewardWorker.stream ─▶ books, record ─▶ SampleJudged
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from conveyor.pipeline.actions import Judge, SampleJudged
from conveyor.pipeline.held_out import HeldOut
from conveyor.pipeline.ledger import Ledger
from conveyor.pipeline.recorder import Recorder
from conveyor.workers.reports import Judged, Notice

log = logging.getLogger(__name__)


class Judging:
    """`renew` once, then `listen` beside any number of `send`s."""

    def __init__(self, rewarder: Any, ledger: Ledger, held_out: HeldOut, recorder: Recorder, tell: Callable[[SampleJudged], None]) -> None:
        """Args:
        rewarder: handle of the RewardWorker.
        tell: takes the events.
        """
        self._rewarder, self._ledger, self._held_out, self._recorder, self._tell = rewarder, ledger, held_out, recorder, tell

    async def renew(self) -> None:
        """Another run begins."""
        await self._rewarder.renew.remote()

    async def send(self, judges: Sequence[Judge]) -> None:
        """Samples that came together go together; those of the training before held-out ones."""
        trained = [judge.sample for judge in judges if judge.version is None]
        held_out = [(judge.version, judge.sample) for judge in judges if judge.version is not None]
        if trained:
            await self._rewarder.judge.remote(self._ledger.rollouts(trained), True)
        if held_out:
            await self._rewarder.judge.remote([self._held_out.rollout(*one) for one in held_out], False)

    async def listen(self) -> None:
        """What functions and urls say, as it becomes known; until it is cancelled."""
        async for reference in self._rewarder.stream.remote():
            for told in await reference:
                if isinstance(told, Notice):
                    log.warning("%s", told.text)
                else:
                    self._tell(self._noted(told))
        raise RuntimeError("the worker of reward functions ended its stream before the run was over")

    def _noted(self, judged: Judged) -> SampleJudged:
        if judged.id.group < 0:
            self._held_out.judged(judged)
            self._recorder.judged_held_out(judged)
            return SampleJudged(judged.id, judged.version)
        equal = self._ledger.add_judged(judged)
        self._recorder.judged(judged)
        return SampleJudged(judged.id, None, equal)
