"""The weights of a train worker on their way out: into the object store, or to the engines that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from conveyor.workers.reports import Publication
from conveyor.workers.weight_stream import Sender, Transport, announce, layout_of
from conveyor.workers.weight_sync import BucketWriter, Place, publish

Walk = Callable[[], Iterator[tuple[str, Tensor]]]
"""Goes once through the weights of a model; collective."""


class Outgoing:
    """Of one rank. Every rank of a train group makes the same calls in the same order."""

    def __init__(self, rank: int, *, verify: bool) -> None:
        self._rank, self._verify = rank, verify
        self._writer = BucketWriter()
        self._sender: Sender | None = None
        self._layouts: dict[str, tuple[Place, ...]] = {}
        self._announced: dict[str, int] = {}
        """Role → the version that its weights have, as long as they do."""

    def open(self, transport: Transport, engine: int, address: str, port: int, size: int) -> None:
        """Meet the processes of an engine, which this rank serves. Waits for them."""
        self._sender = self._sender or Sender(transport)
        self._sender.open(engine, address, port, size)

    def publish(self, walk: Walk, version: int, role: str, *, stored: bool) -> Publication | None:
        """Rank 0 returns the weights. Not `stored`: they stay here, to be sent with `send` until they change."""
        if stored:
            return publish(walk(), version, role, verify=self._verify, keep=self._rank == 0, writer=self._writer)
        if role not in self._layouts:
            self._layouts[role] = layout_of(walk())
        self._announced[role] = version
        announced = announce(walk() if self._verify else (), self._layouts[role], version, role, verify=self._verify)
        return announced if self._rank == 0 else None

    def send(self, walk: Walk, version: int, role: str, engines: Sequence[int]) -> None:
        """The weights that were announced, to those of these engines that this rank serves. A rank that serves none takes part in
        gathering them."""
        assert self._announced.get(role) == version, f"{role}: version {version} was asked for when it had changed"
        (self._sender or Sender("gloo")).send(walk(), self._layouts[role], engines)

    def changed(self) -> None:
        """The weights are no longer what was announced."""
        self._announced.clear()
