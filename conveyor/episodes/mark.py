"""A mark in shared memory: whose code runs at this moment.

A process that hangs cannot say why, and not even a thread of it can while C code holds the interpreter (a regular expression
that backtracks for ever). So it says beforehand, and whoever waits for it reads the mark.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time

_FORM = struct.Struct("<qd")
NOBODY = 0


class Mark:
    """A sample's number, and since when its code runs; `NOBODY` between the steps of samples."""

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: of the file of a mark that another process has made; None: a new one."""
        if descriptor is None:
            descriptor, path = tempfile.mkstemp()
            os.unlink(path)
            os.ftruncate(descriptor, _FORM.size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _FORM.size)

    def set(self, number: int) -> None:
        _FORM.pack_into(self._memory, 0, number, time.monotonic())

    def clear(self) -> None:
        _FORM.pack_into(self._memory, 0, NOBODY, 0.0)

    def read(self) -> tuple[int, float]:
        """(number, `time.monotonic()` when its step began); the clock is the machine's, so it is every process's."""
        number, since = _FORM.unpack_from(self._memory)
        return number, since

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
