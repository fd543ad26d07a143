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


def serve(pipe: Connection, function: Callable[..., Any], fixed: dict[str, Any]) -> None:
    """Answer calls until the caller closes the pipe. `fixed`: arguments of every call."""
    # One loop for all calls: an async function may keep clients that belong to it.
    loop = asyncio.new_event_loop()
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(function, arguments | fixed, loop))


def _answer(function: Callable[..., Any], arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
    try:
        given = accepted(function, arguments)
        # A column that no sample of this call has, though others may: what turns tell, say, of a sample whose turns were cut.
        absent = {name: [None] * len(arguments["prompts"]) for name in lacking(function, given)}
        result = function(**given, **absent)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_wait(result))
    except BaseException as error:  # SystemExit too: ending the process is not the function's to decide
        traceback.print_exception(error)
        return "failed", f"raised {where_raised(error)}"
    try:
        return "scores", checked_scores(result, len(arguments["prompts"]))
    except WrongCount as error:
        return "miscounted", str(error)
    except ValueError as error:
        return "failed", str(error)


async def _wait(result: Any) -> Any:
    return await result


def end_with_caller() -> None:
    """For a thread: ends this process when its caller ends."""
    sys.stdin.buffer.read()  # returns when the caller's end closes
    os._exit(0)


def main() -> None:
    descriptor, named, key = sys.argv[1:]
    threading.Thread(target=end_with_caller, daemon=True).start()
    pipe = Connection(int(descriptor))
    fixed = pipe.recv()
    try:
        function = load_function(named, key, fixed)
    except UserError as error:
        pipe.send(("refused", str(error)))
        return
    pipe.send(("ready", ""))
    serve(pipe, function, fixed)


if __name__ == "__main__":
    main()
