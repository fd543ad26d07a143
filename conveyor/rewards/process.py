"""A reward function in a process of its own: called over a pipe, ended when it takes too long.

    FunctionProcess (here)  ── (number of the call, arguments) ──▶  child.py
                            ◀── (number, "scores", list) or (number, "failed" or "miscounted", text) ──

A thread cannot be stopped from outside, so only a process keeps a function that never returns from
holding up the run. The child is a fresh interpreter rather than a fork: the caller has torch, Ray
and threads in it. It ends when its standard input closes, that is with the caller, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from conveyor.config import UserError

MOST_LOG = 64 * 2**20
"""Bytes of the file that takes what functions print; what comes after that is thrown away."""

LONGEST_WAIT = 20 * 86400.0
"""Seconds; poll takes milliseconds that fit 31 bits."""

END_TIMEOUT = 5.0
"""Seconds for a child that has closed its pipe to end, and past its time for a message that has begun."""

START_TIMEOUT = 120.0
"""Seconds for the child to start and import the function's module."""


class CallTimeout(Exception):
    """The call took longer than its limit; the process has been ended."""


class CallFailed(Exception):
    """The function raised, returned no valid scores, or took its process down."""


class CallMiscounted(Exception):
    """The function did not return one score a sample."""


class CallClosed(Exception):
    """The process was ended for good, before the call or during it."""


class ChildProcess:
    """A fresh interpreter that has imported a function, at the other end of a pipe; it and whatever it has started end with this
    process. One thread at a time.
    """

    module: ClassVar[str]
    """What the interpreter runs, with the descriptors, the function's name and its key as arguments."""

    def __init__(self, named: str, key: str, log: Path | None = None, descriptors: tuple[int, ...] = ()) -> None:
        """log: a file to which goes what the function prints; default: where this process prints.
        descriptors: open files that the child is given beside its end of the pipe."""
        self._named, self._key, self._log, self._descriptors = named, key, log, descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Start the child and wait until it has imported the function.

        Raises:
            UserError: the function cannot be loaded (see `functions.load_function`).
        """
        if self._process is not None:
            return
        self._pipe, theirs = Pipe()
        given = (theirs.fileno(), *self._descriptors)
        command = [sys.executable, "-m", self.module, *map(str, given), self._named, self._key]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONUNBUFFERED": "1"}
        with self._open_log() as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=given, env=environment, start_new_session=True
            )  # fmt: skip
        theirs.close()
        self._greet()
        try:
            kind, text = self._receive(START_TIMEOUT)
        except (CallTimeout, CallFailed) as error:
            raise UserError(f"{self._key}: importing {self._named}: {error}") from None
        if kind != "ready":
            self.close()
            raise UserError(text)

    def _greet(self) -> None:
        """What the child is told before it imports the function."""

    def _open_log(self) -> AbstractContextManager[Any]:
        if self._log is None:
            return nullcontext()
        self._log.parent.mkdir(parents=True, exist_ok=True)  # on another machine the folder may not be there
        full = self._log.is_file() and self._log.stat().st_size > MOST_LOG
        return open(os.devnull, "ab") if full else self._log.open("ab")

    def kill(self) -> None:
        """End the child and whatever it has started; `close` is still to be called."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the child, and forget it: `start` starts another."""
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _receive(self, timeout: float) -> tuple[Any, ...]:
        assert self._pipe is not None and self._process is not None
        timeout = min(timeout, LONGEST_WAIT)
        try:
            if self._pipe.poll(timeout):
                with self._ended_after(timeout + END_TIMEOUT):
                    return self._pipe.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # it may live on without its pipe
                self._process.wait(END_TIMEOUT)
            code = self._process.poll()
            self.close()
            why = "its pipe was closed, or written to by something else" if code is None else f"its process ended with status {code}"
            raise CallFailed(why) from None
        except Exception as error:  # unpickling may raise anything
            self.close()
            raise CallFailed(f"its answer cannot be read ({type(error).__name__}): something else was written to its pipe") from None
        self.close()
        raise CallTimeout(f"no answer within {timeout:g} s")

    @contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """Reading and writing of whole messages, which may wait for ever: the child is killed then, which ends the wait."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


class FunctionProcess(ChildProcess):
    """One child process, started at the first call and again after a time-out.

    One call at a time; any thread may make it, and any may end the process.
    """

    module = "conveyor.rewards.child"

    def __init__(self, named: str, key: str, log: Path | None = None, arguments: dict[str, Any] | None = None) -> None:
        """Args:
        log: a file to which goes what the function prints; default: where this process prints.
        arguments: further ones of every call.
        """
        super().__init__(named, key, log)
        self._arguments = arguments or {}
        self._calling = threading.RLock()  # held by the thread that talks to the child
        self._count = 0
        self._ended = False

    def start(self) -> None:
        with self._calling:
            super().start()

    def call(self, arguments: dict[str, Any], timeout: float) -> list[float | None]:
        """Scores of the samples in `arguments` (see `functions`), within `timeout` seconds.

        Raises:
            CallTimeout: no answer in time. The next call starts a new process.
            CallFailed: says in one line what the function did.
            CallMiscounted: says how many scores it returned.
            CallClosed: ended before or meanwhile.
        """
        with self._calling:
            if self._ended:
                raise CallClosed
            try:
                self.start()
                kind, answer = self._ask(arguments, min(timeout, LONGEST_WAIT))
            except (CallFailed, UserError):
                if self._ended:
                    raise CallClosed from None
                raise
        if kind == "miscounted":
            raise CallMiscounted(answer)
        if kind == "failed":
            raise CallFailed(answer)
        if len(answer) != len(arguments["prompts"]):
            raise CallMiscounted(f"returned {len(answer)} scores for {len(arguments['prompts'])} samples")
        return answer

    def _ask(self, arguments: dict[str, Any], timeout: float) -> tuple[str, Any]:
        self._count += 1
        deadline = time.monotonic() + timeout
        with self._ended_after(timeout + END_TIMEOUT):  # a child that reads nothing
            self._send((self._count, arguments))
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._receive(left)
            except CallTimeout:
                break
            match message:
                case (self._count, "scores", list() as scores):
                    return "scores", scores
                case (self._count, "failed" | "miscounted" as kind, str() as text):
                    return kind, text
                # else the answer of an earlier call, or what the function itself has written there
        self.close()
        raise CallTimeout(f"no answer within {timeout:g} s")

    def end(self) -> None:
        """End the child and whatever it has started, for good; also during a call of another thread."""
        self._ended = True
        while not self._calling.acquire(timeout=0.05):
            self.kill()  # again and again: the caller may be just starting it
        self.close()
        self._calling.release()

    def _greet(self) -> None:
        self._send((self._arguments, None if self._log is None else MOST_LOG))

    def _send(self, message: tuple[Any, ...]) -> None:
        assert self._pipe is not None
        with suppress(OSError):  # a child that has died since the last call; _receive says so
            self._pipe.send(message)
