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
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conveyor.config import UserError

START_TIMEOUT = 120.0
"""Seconds for the child to start and import the function's module."""


class CallTimeout(Exception):
    """The call took longer than its limit; the process has been ended."""


class CallFailed(Exception):
    """The function raised, returned no valid scores, or took its process down."""


class CallMiscounted(Exception):
    """The function did not return one score a sample."""


class FunctionProcess:
    """One child process, started at the first call and again after a time-out.

    One call at a time; any thread may make it.
    """

    def __init__(self, named: str, key: str, log: Path | None = None) -> None:
        """log: a file to which goes what the function prints; default: where this process prints."""
        self._named, self._key, self._log = named, key, log
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
        command = [sys.executable, "-m", "conveyor.rewards.child", str(theirs.fileno()), self._named, self._key]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONUNBUFFERED": "1"}
        with self._open_log() as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(theirs.fileno(),), env=environment, start_new_session=True
            )  # fmt: skip
        theirs.close()
        try:
            kind, text = self._receive(START_TIMEOUT)
        except (CallTimeout, CallFailed) as error:
            raise UserError(f"{self._key}: importing {self._named}: {error}") from None
        if kind != "ready":
            self.close()
            raise UserError(text)

    def _open_log(self) -> AbstractContextManager[Any]:
        if self._log is None:
            return nullcontext()
        self._log.parent.mkdir(parents=True, exist_ok=True)  # on another machine the folder may not be there
        return self._log.open("ab")

    def call(self, arguments: dict[str, Any], timeout: float) -> list[float | None]:
        """Scores of the samples in `arguments` (see `functions`), within `timeout` seconds.

        Raises:
            CallTimeout: no answer in time. The next call starts a new process.
            CallFailed: says in one line what the function did.
            CallMiscounted: says how many scores it returned.
        """
        self.start()
        assert self._pipe is not None
        with suppress(BrokenPipeError):  # a child that has died since the last call; _receive says so
            self._pipe.send(arguments)
        kind, answer = self._receive(timeout)
        if kind == "miscounted":
            raise CallMiscounted(answer)
        if kind == "failed":
            raise CallFailed(answer)
        return answer

    def close(self) -> None:
        """End the child and whatever it has started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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
