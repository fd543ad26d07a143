"""A program run with its tests in a process that can do nothing but compute.

    Sandbox.run ── program, tests ──▶ confined.py (python -I -S, empty environment, a folder of its own)
                ◀── a mark a passed test ──

The walls are Linux's: Landlock (files), seccomp (processes, network, signals …), resource limits, no
capabilities; `confined.py` puts them up before it reads a line of the program. Where the kernel lacks one,
nothing is run.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

CONFINED = Path(__file__).with_name("confined.py")
FILE_MIB = 1
"""Largest file a program may write, in its own folder, which is deleted after it."""
START_SECONDS = 30.0
"""For the process to put its walls up, on however busy a machine; the program's own time begins then."""
FOLDERS = "conveyor-sandbox-"
OLD_SECONDS = 60.0
"""A younger folder may be one whose caller has not locked it yet."""
LONGEST_WAIT = 20 * 86400.0
"""Seconds; poll takes milliseconds that fit 31 bits."""
MOST_REPORT = 2**20
"""Bytes read from a program that writes where the marks go."""


class SandboxError(RuntimeError):
    """The sandbox could not be set up: says what is missing."""


class Sandbox:
    """Limits for programs; each program has a process of its own."""

    def __init__(self, seconds: float, memory_mib: int) -> None:
        """Args:
        seconds: of wall clock, for a program with all its tests; 20 days at most.
        memory_mib: address space.
        """
        self._seconds, self._memory_mib = min(seconds, LONGEST_WAIT), memory_mib

    def run(self, program: str, tests: list[str]) -> list[bool]:
        """Which tests pass: run after the program, one after the other in the same process. A program that raises passes none,
        and one that ends early, or is ended at a limit, none from there on.

        Raises:
            SandboxError: no such confinement on this machine.
        """
        with _own_folder() as folder:
            marks = [secrets.token_hex(16) for _ in ("ready", *tests)]
            report = self._report(folder, {"program": program, "tests": tests, "marks": marks})
        lines = report.split("\n")
        if lines[0] != marks[0]:
            raise SandboxError(f"the sandbox for programs cannot be set up: {lines[0] or 'its process ended early'}")
        passed = set(lines[1:])
        return [mark in passed for mark in marks[1:]]

    def _report(self, folder: str, job: dict[str, object]) -> str:
        """What the process writes until it ends or its time is over."""
        limits = {"seconds": self._seconds, "memory": self._memory_mib * 2**20, "file": FILE_MIB * 2**20, "parent": os.getpid()}
        ours, theirs = os.pipe()
        with open(ours, "rb", buffering=0) as marks, open(theirs, "wb", buffering=0) as given:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(CONFINED), str(theirs)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, cwd=folder, env={}, pass_fds=(theirs,), start_new_session=True,
            )  # fmt: skip
            try:
                given.close()  # or the end of the process would not end what is read
                assert process.stdin is not None
                with suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(json.dumps(job | limits | {"folder": folder}).encode())
                ready = _read(marks, START_SECONDS, until=b"\n")
                return (ready + _read(marks, self._seconds)).decode(errors="replace")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _own_folder() -> Iterator[str]:
    """A folder that is deleted afterwards, and locked until then."""
    folder = tempfile.mkdtemp(prefix=FOLDERS)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        _delete(folder)
        os.close(lock)


def _delete(folder: str) -> None:
    """Delete a folder however deep a program has made it, and whatever modes its folders have. Where that fails, what is left stays
    for `sweep`: it says nothing about the program.

    Folders are moved to the top before they are emptied, so that no path grows long and nothing recurs.
    """
    with suppress(OSError):
        full = [folder]
        while full:
            path = full.pop()
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in list(entries):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)  # or it could not be moved
                    full.append(os.path.join(folder, secrets.token_hex(16)))
                    os.rename(entry.path, full[-1])
            if path != folder:
                os.rmdir(path)
        os.rmdir(folder)


def sweep() -> None:
    """Delete folders of callers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):  # of another user, or just deleted
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > OLD_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its caller lives
                    _delete(str(folder))
            finally:
                os.close(lock)


def _read(marks: FileIO, seconds: float, until: bytes | None = None) -> bytes:
    """Until the other end closes, time is over, `until` comes, or more comes than marks can be."""
    waiting = select.poll()
    waiting.register(marks, select.POLLIN)
    deadline, report = time.monotonic() + seconds, b""
    while len(report) < MOST_REPORT and (left := deadline - time.monotonic()) > 0 and waiting.poll(1000 * left):
        if not (piece := os.read(marks.fileno(), 65536)):
            break
        report += piece
        if until is not None and until in report:
            break
    return report
