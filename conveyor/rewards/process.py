"""A reward function in a process of its own: called over a pipe, ended when it takes too long.

    FunctionProcess (here)  ── arguments ──▶  child.py
                            ◀── ("scores", list) or ("failed", text) ──

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
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from conveyor.config import UserError

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
        return self._log.open("ab")

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

    def _receive(self, timeout: float) -> tuple[str, Any]:
        assert self._pipe is not None and self._process is not None
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            self.close()
            raise CallFailed(f"its process ended with status {code}") from None
        self.close()
        raise CallTimeout(f"no answer within {timeout:g} s")


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
                self._send(arguments)
                kind, answer = self._receive(timeout)
            except (CallFailed, UserError):
                if self._ended:
                    raise CallClosed from None
                raise
        if kind == "miscounted":
            raise CallMiscounted(answer)
        if kind == "failed":
            raise CallFailed(answer)
        return answer

    def end(self) -> None:
        """End the child and whatever it has started, for good; also during a call of another thread."""
        self._ended = True
        while not self._calling.acquire(timeout=0.05):
            self.kill()  # again and again: the caller may be just starting it
        self.close()
        self._calling.release()

    def _greet(self) -> None:
        self._send(self._arguments)

    def _send(self, arguments: dict[str, Any]) -> None:
        assert self._pipe is not None
        with suppress(BrokenPipeError):  # a child that has died since the last call; _receive says so
            self._pipe.send(arguments)
