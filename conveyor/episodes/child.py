"""The process a rollout function runs in: `python -m conveyor.episodes.child PIPE MARK FUNCTION KEY`.

All samples are tasks of one event loop. What comes and goes over the pipe:

    start N arguments timeout ─▶                 ─▶ began N
                                                 ─▶ generate N observation max_tokens stop
    turn N turn | refuse N text ─▶               ─▶ ended N returned columns | failed text | time
    drop N ─▶

N is the sample's number; of one that has ended nothing more is said.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conveyor.config import UserError
from conveyor.episodes.functions import Turn, checked_columns, checked_observation, load_rollout_function
from conveyor.episodes.mark import NOBODY, Mark
from conveyor.rewards.child import end_if_copied, end_with_caller
from conveyor.rewards.functions import accepted, where_raised

_sample: contextvars.ContextVar[int] = contextvars.ContextVar("sample", default=NOBODY)
"""Whose code this is; tasks that a function starts inherit it."""

_PACKAGE = str(Path(__file__).parent)


@dataclass(slots=True)
class _Playing:
    task: asyncio.Task[None]
    timer: asyncio.TimerHandle
    turn: asyncio.Future[Turn] | None = None
    """Being sampled."""


class Player:
    """Plays samples until the caller closes the pipe."""

    def __init__(self, pipe: Connection, function: Callable[..., Any], mark: Mark) -> None:
        self._pipe, self._function, self._mark, self._own = pipe, function, mark, os.getpid()
        self._playing: dict[int, _Playing] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)  # type: ignore[arg-type]

    def serve(self) -> None:
        self._loop.add_reader(self._pipe.fileno(), self._receive)
        self._loop.run_forever()

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any) -> asyncio.Task[Any]:
        context: contextvars.Context | None = settings.get("context")
        number = _sample.get() if context is None else context.get(_sample, NOBODY)
        return asyncio.Task(_marked(coroutine, number, self._mark), loop=loop, **settings)

    def _receive(self) -> None:
        try:
            while self._pipe.poll():
                kind, number, *rest = self._pipe.recv()
                if kind == "start":
                    self._start(number, *rest)
                elif number in self._playing:
                    self._go_on(kind, number, *rest)
        except (EOFError, ConnectionResetError):
            self._loop.stop()

    def _start(self, number: int, arguments: dict[str, Any], timeout: float) -> None:
        self._pipe.send(("began", number))
        context = contextvars.copy_context()
        context.run(_sample.set, number)
        deadline = self._loop.time() + timeout
        task = self._loop.create_task(self._play(number, arguments, deadline), context=context)
        self._playing[number] = _Playing(task, self._loop.call_at(deadline, self._end, number, "time"))

    def _go_on(self, kind: str, number: int, value: Any = None) -> None:
        playing = self._playing[number]
        if kind == "drop":
            self._end(number)
            return
        turn, playing.turn = playing.turn, None
        assert turn is not None
        if turn.cancelled():  # the function waits for it no more
            return
        if kind == "turn":
            turn.set_result(Turn(*value))
        else:
            turn.set_exception(ValueError(value))

    def _end(self, number: int, *how: Any) -> None:
        """`how`: what the caller is told, which it is once; nothing where it knows."""
        end_if_copied(self._own)
        playing = self._playing.pop(number, None)
        if playing is None:
            return
        self._pipe.send(("ended", number, *(how or ("dropped",))))
        playing.timer.cancel()
        if playing.task is not asyncio.current_task(self._loop):
            playing.task.cancel()

    async def _play(self, number: int, arguments: dict[str, Any], deadline: float) -> None:
        given = arguments | {"generate": partial(self._generate, number)}
        try:
            result = await self._function(**accepted(self._function, given))
        except BaseException as error:  # SystemExit too: ending the process is not the function's to decide
            if number in self._playing:  # else a limit has ended it, with a CancelledError
                _end_where_called(error)
                traceback.print_exception(error)
                self._end(number, "failed", f"raised {where_raised(error)}")
        else:
            self._end(number, *(("time",) if self._loop.time() > deadline else _outcome(result)))

    async def _generate(
        self, number: int, observation: Any = None, *, max_tokens: int | None = None, stop: str | list[str] | None = None
    ) -> Turn:
        """The model goes on, after `observation` where there is one.

        Args:
            observation: a text, or chat messages, of a tool or an environment. It is no part of the loss.
            max_tokens: the most tokens of this turn; what is left of `rollout.max_response_length` bounds it too.
            stop: strings that end this turn, beside those of `rollout.stop`.
        """
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(isinstance(each, str) and each for each in stops):
            raise TypeError("stop is a text or a list of texts, none of them empty")
        "".join(stops).encode()  # ValueError: half of a surrogate pair, which the engine cannot take
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens is {max_tokens!r}, not a whole number from 1")
        said = None if observation is None else checked_observation(observation)
        playing = self._playing.get(number)
        if playing is None:
            raise RuntimeError("generate was called after the sample had ended")
        if playing.turn is not None:
            raise RuntimeError("generate was called while another turn of the sample is sampled; they come one after the other")
        playing.turn = self._loop.create_future()
        self._pipe.send(("generate", number, said, max_tokens, stops))
        return await playing.turn


async def _marked(coroutine: Coroutine[Any, Any, Any], number: int, mark: Mark) -> Any:
    return await _Steps(coroutine, number, mark)


@dataclass(slots=True)
class _Steps:
    """A coroutine, of which every step, from one wait to the next, is marked as its sample's."""

    coroutine: Coroutine[Any, Any, Any]
    number: int
    mark: Mark

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self.coroutine.send, None)
        while True:
            self.mark.set(self.number)
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self.mark.clear()
            try:
                step = partial(self.coroutine.send, (yield waits_for))
            except BaseException as error:  # whatever it is, it is for the coroutine
                step = partial(self.coroutine.throw, error)


def _outcome(result: Any) -> tuple[str, Any]:
    try:
        return "returned", checked_columns(result)
    except ValueError as error:
        return "failed", str(error)
    except BaseException as error:  # what was returned has code of its own
        return "failed", f"returned columns that raise {where_raised(error)}"


def _end_where_called(error: BaseException) -> None:
    """Cut off the traceback's last places, where they are in this package: the function has called `generate` wrongly."""
    last, place = None, error.__traceback__
    while place is not None:
        if not place.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last = place
        place = place.tb_next
    if last is not None:
        last.tb_next = None


def main() -> None:
    pipe, mark, named, key = sys.argv[1:]
    end_with_caller()
    connection = Connection(int(pipe))
    try:
        function = load_rollout_function(named, key)
    except UserError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("ready", ""))
    Player(connection, function, Mark(int(mark))).serve()


if __name__ == "__main__":
    main()
