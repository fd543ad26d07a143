"""The process a reward function runs in: `python -m conveyor.rewards.child FD FUNCTION KEY`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from conveyor.config import UserError
from conveyor.rewards.functions import WrongCount, accepted, checked_scores, lacking, load_function, where_raised


def serve(pipe: Connection, function: Callable[..., Any], fixed: dict[str, Any], most_log: int | None) -> None:
    """Answer calls until the caller closes the pipe.

    Args:
        fixed: arguments of every call.
        most_log: what the function prints goes to a file, and once that has so many bytes, nowhere; None: to no such file.
    """
    # One loop for all calls: an async function may keep clients that belong to it.
    loop, own = asyncio.new_event_loop(), os.getpid()
    while True:
        try:
            number, arguments = pipe.recv()
        except EOFError:
            return
        if most_log is not None:
            _bound_log(most_log)
        kind, value = _answer(function, arguments | fixed, loop)
        end_if_copied(own)
        pipe.send((number, kind, value))


def _answer(function: Callable[..., Any], arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
    count = len(arguments["prompts"])  # now: the function may change its lists
    try:
        given = accepted(function, arguments)
        # A column that no sample of this call has, though others may: what turns tell, say, of a sample whose turns were cut.
        absent = {name: [None] * count for name in lacking(function, given)}
        result = function(**given, **absent)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_wait(result))
    except BaseException as error:  # SystemExit too: ending the process is not the function's to decide
        traceback.print_exception(error)
        return "failed", f"raised {where_raised(error)}"
    try:
        return "scores", checked_scores(result, count)
    except WrongCount as error:
        return "miscounted", str(error)
    except ValueError as error:
        return "failed", str(error)
    except BaseException as error:  # a result has code of its own
        return "failed", f"returned scores that raise {where_raised(error)}"


async def _wait(result: Any) -> Any:
    return await result


def _bound_log(most: int) -> None:
    if os.fstat(1).st_size > most:  # of /dev/null: 0
        os.write(1, f"\nMore than {most} bytes: no more is written here.\n".encode())
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)


def end_if_copied(own: int) -> None:
    """A function that forks and returns in both processes has only the first, `own`, answer: they share the pipe."""
    if os.getpid() != own:
        os._exit(0)


def end_with_caller() -> None:
    """Have this process end when its caller ends, which closes standard input; for the function, that is empty."""
    watched = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        try:
            os.read(watched, 1)  # returns when the caller's end closes
        finally:
            os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    descriptor, named, key = sys.argv[1:]
    end_with_caller()
    pipe, own = Connection(int(descriptor)), os.getpid()
    fixed, most_log = pipe.recv()
    try:
        function = load_function(named, key, fixed)
    except UserError as error:
        pipe.send(("refused", str(error)))
        return
    end_if_copied(own)
    pipe.send(("ready", ""))
    serve(pipe, function, fixed, most_log)


if __name__ == "__main__":
    main()
