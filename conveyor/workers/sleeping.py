"""Workers of a device group that several stages share give its memory back while another stage has its turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from conveyor.models.parking import Parking


class Sleeper(ABC):
    """A worker whose device memory waits in host memory between `sleep` and `wake`, and is then what it was, bit for bit."""

    @cached_property
    def _parking(self) -> Parking:
        return Parking()

    @abstractmethod
    def _memory(self) -> Any:
        """What holds the tensors that are to leave the device."""

    def sleep(self) -> int:
        """Leave the device; returns the bytes given back. Nothing but `wake` may come next, and what needs no device."""
        return self._parking.park(self._memory())

    def wake(self) -> int:
        """Come back; returns the bytes taken."""
        return self._parking.unpark()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Awake for a moment, for files: another stage has its turn, but its largest tensors are those of its tasks."""
        asleep = self._parking.asleep
        if asleep:
            self.wake()
        try:
            yield
        finally:
            if asleep:
                self.sleep()
