"""Prompts in stages, each sampled by weights of its own, in one run of the scheduler.

A stage opens when every sample of the stages before has left the engines and its weights are there; what left is scored meanwhile.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate


class Stages:
    """`admit` for each prompt before it is sampled, `left` when it has left its engine. For one run, in its event loop."""

    def __init__(self, sizes: Sequence[int], enter: Callable[[int], Awaitable[None]]) -> None:
        """Args:
        sizes: prompts of each stage; places run through all of them.
        enter: awaited once a stage that has prompts, when nothing of the stages before is in an engine: puts its weights in place.
        """
        self._ends, self._enter = list(accumulate(sizes)), enter
        self._unsampled = list(sizes)
        self._free = [asyncio.Event() for _ in (*sizes, None)]
        """Stage → whether those before it have left."""
        self._entered: dict[int, asyncio.Task[None]] = {}
        self._advance()

    async def admit(self, place: int) -> None:
        """Returns when the prompt at this place may be sampled. Raises what `enter` of its stage raises."""
        stage = self._stage(place)
        if stage not in self._entered:
            self._entered[stage] = asyncio.get_running_loop().create_task(self._open(stage))
        await asyncio.shield(self._entered[stage])

    def left(self, place: int) -> None:
        self._unsampled[self._stage(place)] -= 1
        self._advance()

    async def _open(self, stage: int) -> None:
        await self._free[stage].wait()
        await self._enter(stage)

    def _stage(self, place: int) -> int:
        return bisect_right(self._ends, place)

    def _advance(self) -> None:
        for stage, free in enumerate(self._free):
            free.set()
            if stage < len(self._unsampled) and self._unsampled[stage]:
                break
