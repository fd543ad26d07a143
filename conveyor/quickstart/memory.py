"""How much memory this process and everything it started took at most."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

INTERVAL = 2.0
"""Seconds between two looks; one costs some milliseconds a process."""


class PeakMemory:
    """`with PeakMemory() as memory: …`, then `memory.gib`. Memory that processes share is counted once, where the system tells."""

    def __init__(self) -> None:
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    @property
    def gib(self) -> float:
        return self._peak / 2**30

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        here = psutil.Process()
        while True:
            self._peak = max(self._peak, sum(_bytes(process) for process in (here, *here.children(recursive=True))))
            if self._ended.wait(INTERVAL):
                return


def _bytes(process: psutil.Process) -> int:
    """Linux: the proportional set size, in which a page shared by n processes counts 1/n in each. Elsewhere the resident size."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except ProcessLookupError:
        return 0
    except OSError:
        pass  # no such file on this system, or the process has just ended: the next line knows
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
