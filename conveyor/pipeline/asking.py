"""Calls of workers, watched: each has so long to answer, and what comes of a failure names the worker.

A rank that fails or hangs leaves the others in a collective. Then those say little ("connection closed", "timed out"), or die of it,
and one of them may be heard first; so the others are listened to for a moment before anyone is blamed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from conveyor.workers.failures import LISTEN_SECONDS, Who, failure, is_lost, lost, stuck


class Asking:
    """The calls of one run."""

    def __init__(self, timeout: float, left: Callable[[], str] = lambda: "") -> None:
        """Args:
        timeout: seconds for one call. Calls of a worker are carried out one after the other, so a call's time begins when the one
            before it is answered.
        left: what is left of the run, for the end of the line.
        """
        self._timeout, self._left = timeout, left
        self._answered: dict[Who, float] = {}

    async def one(self, who: Who, task: str, answer: Awaitable[Any]) -> Any:
        """A worker's answer.

        Raises:
            RunError: it did not come in time, or the worker died or has no memory; names it. Any other exception is the worker's own.
        """
        return (await self.all([(who, answer)], task))[0]

    async def all(self, asked: Sequence[tuple[Who, Awaitable[Any]]], task: str) -> list[Any]:
        """The answers of workers that do something together, in the order asked."""
        calls: dict[asyncio.Future[Any], Who] = {asyncio.ensure_future(answer): who for who, answer in asked}
        sent = time.monotonic()
        try:
            pending = await self._answers(calls, sent)
            failed = any(call.exception() for call in calls if call.done())
            if not pending and not failed:
                return [call.result() for call in calls]
            if pending and self._says_little(calls):
                await asyncio.wait(pending, timeout=min(LISTEN_SECONDS, self._timeout))
            raise self._blame(calls, task, late=time.monotonic() >= self._deadline(calls, sent))
        finally:
            for call in calls:
                call.cancel()

    async def _answers(self, calls: dict[asyncio.Future[Any], Who], sent: float) -> set[asyncio.Future[Any]]:
        """Waits for all, for the first failure, or until the time is up → calls that are not answered."""
        pending = set(calls)
        while pending and (left := self._deadline(calls, sent) - time.monotonic()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            self._answered.update((calls[call], time.monotonic()) for call in done)
            if any(call.exception() for call in done):
                break
        return pending

    def _deadline(self, calls: dict[asyncio.Future[Any], Who], sent: float) -> float:
        """Answers to this very call do not lengthen it, except where the calls before it are not answered yet."""
        before = [self._answered.get(who, sent) for call, who in calls.items() if not call.done()]
        return max([sent, *before]) + self._timeout

    def _says_little(self, calls: dict[asyncio.Future[Any], Who]) -> bool:
        errors = [error for call in calls if call.done() and (error := call.exception())]
        return all(is_lost(error) for error in errors)

    def _blame(self, calls: dict[asyncio.Future[Any], Who], task: str, late: bool) -> BaseException:
        everyone = list(calls.values())
        errors = {who: error for call, who in calls.items() if call.done() and (error := call.exception())}
        silent = [who for call, who in calls.items() if not call.done()]
        telling = {who: error for who, error in errors.items() if not is_lost(error)}
        # Where time was up, ranks that died did so because a collective of theirs was given up.
        dead_only = all(isinstance(error, RayActorError) for error in telling.values())
        if silent and dead_only and (late or not telling):
            return stuck(everyone, silent, task, self._timeout, self._left())
        if telling:
            who, error = min(telling.items(), key=lambda item: isinstance(item[1], RayActorError))
            return failure(who, error, self._left())
        return lost(everyone, task, next(iter(errors.values())), self._left())
