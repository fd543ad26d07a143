"""The process a rollout function runs in, from outside: messages to it and from it, and its end when it hangs.

Two threads, so that whoever sends a message never waits: one sends, one hears and watches. All samples share one process. When the
function blocks it past its sample's time, or takes it down, it is ended and another one started; the samples that were played in
it then have to begin anew, all but the one that is to blame.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from conveyor.config import sections
from conveyor.episodes.mark import NOBODY, Mark
from conveyor.rewards.process import ChildProcess

KEY = "rollout.multi_turn.function"

GRACE = 1.0
"""Seconds past a sample's time in which the process may still say that it has ended."""

LOOK = 0.1
"""Seconds of silence after which the process is looked at."""

Message = tuple[Any, ...]


class EpisodeProcess(ChildProcess):
    """The child, and the threads that talk to it. The messages are those of `child.py`, and from here also:

    restarted N why   Another process is there. N is to blame, `NOBODY`: none that has not ended; why is how the process had ended,
                      None where it had to be ended for hanging.
    broken error      No more messages come.
    """

    module = "conveyor.episodes.child"

    def __init__(self, settings: sections.MultiTurn, hear: Callable[[Message], None]) -> None:
        """hear: called with each message, in a thread of this object; it must not wait."""
        self._mark = Mark()
        super().__init__(settings.function, KEY, descriptors=(self._mark.descriptor,))
        self._timeout, self._hear = settings.timeout, hear
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._deadlines: dict[int, float] = {}
        """Of the samples that have begun; the hearing thread's own."""
        self._sending = threading.Lock()  # guards the pipe against being changed while something is sent
        self._ending = False
        self._threads = [threading.Thread(target=target, name=target.__name__, daemon=True) for target in (self._send_all, self._hear_all)]

    def begin(self) -> None:
        """Start the child and the threads.

        Raises:
            UserError: the function cannot be loaded.
        """
        self.start()
        for thread in self._threads:
            thread.start()

    def send(self, *message: Any) -> None:
        """Returns at once. What is sent to a process that ends is lost: `restarted` says so."""
        self._outgoing.put(message)

    def end(self) -> None:
        """End the child; no message comes after that."""
        self._ending = True
        self.kill()  # nothing waits for a child that hangs
        self._outgoing.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.close()
        self._mark.close()

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            with self._sending, suppress(OSError):  # the child has ended; the hearing thread finds out
                if self._pipe is not None:
                    self._pipe.send(message)

    def _hear_all(self) -> None:
        try:
            while not self._ending:
                self._hear_one()
        except BaseException as error:
            self._hear(("broken", error))

    def _hear_one(self) -> None:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(LOOK):
                hangs, number = self._hangs()
                if hangs:
                    self._restart(number, None)
                return
            kind, number, *rest = self._pipe.recv()
        except (EOFError, OSError):
            if not self._ending:
                self._died()
            return
        if kind == "began":
            self._deadlines[number] = time.monotonic() + self._timeout
            return
        if kind == "ended":
            self._deadlines.pop(number, None)
        self._hear((kind, number, *rest))

    def _hangs(self) -> tuple[bool, int]:
        """Whether the child has to be ended, and the sample to blame."""
        now = time.monotonic()
        running, since = self._mark.read()
        if running != NOBODY and running not in self._deadlines:
            return now > since + GRACE, NOBODY  # it has ended, but for its code
        if running != NOBODY:
            return now > self._deadlines[running] + GRACE, running
        late = [number for number, deadline in self._deadlines.items() if now > deadline + GRACE]
        return bool(late), late[0] if late else NOBODY

    def _died(self) -> None:
        running, _ = self._mark.read()
        self.kill()
        assert self._process is not None
        status = self._process.wait()
        blamed = running if running in self._deadlines else next(iter(self._deadlines), NOBODY)
        self._restart(blamed, f"took its process down (status {status})")

    def _restart(self, blamed: int, why: str | None) -> None:
        self.kill()  # before the lock: the sending thread may hold it and wait for this child
        with self._sending:
            self.close()
            self._mark.clear()
            self._deadlines.clear()
            if self._ending:
                return
            self.start()
        self._hear(("restarted", blamed, why))
