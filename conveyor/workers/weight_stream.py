"""New weights straight from the ranks of a trainer into the processes of the engines, over NCCL or gloo: no host memory between.

    trainer rank r ── chunk · chunk · … ──▶ every process of engine e          r = e mod ranks

Every engine has a group of its own with the rank that serves it, so engines take weights at different times, and ranks serve engines
side by side: under ZeRO-3 each of them has gathered the tensors anyway. On the wire is vLLM's packed form: the bytes of the tensors,
one behind the other, in chunks that end with the tensor that takes them beyond `CHUNK_BYTES`. So vLLM's own NCCL engine receives it;
over gloo `gloo_transfer.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from conveyor.workers.reports import Publication, Span
from conveyor.workers.weight_sync import Place, checksum, flat_bytes

Transport = Literal["nccl", "gloo"]
CHUNK_BYTES = 256 * 2**20
MEETING = timedelta(minutes=10)
"""How long a member of a group waits for the others, and a gloo broadcast for its peer."""


class Group(Protocol):
    """A rank of a trainer, which sends, and the processes of an engine."""

    def broadcast(self, chunk: Tensor) -> None:
        """Begin to send (or receive) uint8 [bytes]. A sender's chunk must stay as it is until `wait`."""

    def wait(self) -> None:
        """Until what was begun is done."""


class GlooGroup:
    """Over TCP, between CPUs."""

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        """Waits for the others. Rank 0 listens and sends."""
        self._store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=MEETING)
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("weights", self._store), rank, size, MEETING)
        self._work: Any = None

    def broadcast(self, chunk: Tensor) -> None:
        self._work = self._group.broadcast(chunk, 0)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class NcclGroup:
    """Between GPUs: the trainer's end of the group that vLLM's NCCL engine joins."""

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        self._group = stateless_init_process_group(address, port, rank, size, torch.cuda.current_device())
        self._stream = torch.cuda.Stream()

    def broadcast(self, chunk: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # which has filled the chunk
        self._group.broadcast(chunk, src=0, stream=self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


GROUPS: dict[Transport, Callable[[str, int, int, int], Group]] = {"nccl": NcclGroup, "gloo": GlooGroup}


class Sender:
    """One rank of a trainer."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._groups: dict[int, Group] = {}

    def open(self, engine: int, address: str, port: int, size: int) -> None:
        """Meet the processes of an engine, which this rank serves from now on. Waits for them."""
        self._groups[engine] = GROUPS[self.transport](address, port, 0, size)

    def send(self, named_weights: Iterable[tuple[str, Tensor]], layout: Sequence[Place], engines: Sequence[int]) -> None:
        """Weights for some engines. Every rank walks the iterator, whose gathers are collective, and sends to those it serves. While a
        chunk is on its way the next is gathered.

        Args:
            named_weights: as `layout` says; a tensor need stay valid only until the next one is asked for.
        """
        groups = [self._groups[engine] for engine in engines if engine in self._groups]
        weights = iter(named_weights)
        if not groups:
            for _ in weights:
                pass
            return
        on_its_way: Tensor | None = None
        for places in chunks(layout):
            chunk = _filled(places, weights)
            for group in groups:
                group.wait()
                group.broadcast(chunk)
            on_its_way = chunk  # the last one's memory may go now, this one's may not
        for group in groups:
            group.wait()
        del on_its_way
        assert next(weights, None) is None, "there are more weights than were announced"


def chunks(layout: Iterable[Place], chunk_bytes: int | None = None) -> Iterator[list[Place]]:
    """The tensors of each chunk."""
    places: list[Place] = []
    size = 0
    for place in layout:
        places.append(place)
        size += nbytes(place)
        if size > (CHUNK_BYTES if chunk_bytes is None else chunk_bytes):
            yield places
            places, size = [], 0
    if places:
        yield places


def nbytes(place: Place) -> int:
    return prod(place.shape) * place.dtype.itemsize


def layout_of(named_weights: Iterable[tuple[str, Tensor]]) -> tuple[Place, ...]:
    """What an iterator of weights gives, and in which order; offsets mean nothing here."""
    return tuple([Place(name, tensor.dtype, tuple(tensor.shape), 0) for name, tensor in named_weights])


def announce(
    named_weights: Iterable[tuple[str, Tensor]], layout: Sequence[Place], version: int, role: str, *, verify: bool
) -> Publication:  # fmt: skip
    """A publication of weights that stay where they are until an engine asks. `verify`: walk them, for a checksum per tensor."""
    start = time.time()
    checksums = {name: checksum(tensor) for name, tensor in named_weights} if verify else None
    size = sum(nbytes(place) for place in layout)
    return Publication(version, role, (), checksums, size, Span(start, time.time()), tuple(layout))


def update_info(layout: Iterable[Place]) -> Mapping[str, Any]:
    """What vLLM's NCCL engine is told before weights come."""
    places = list(layout)
    return {
        "names": [place.name for place in places],
        "dtype_names": [str(place.dtype).removeprefix("torch.") for place in places],
        "shapes": [list(place.shape) for place in places],
    }


def _filled(places: Sequence[Place], weights: Iterator[tuple[str, Tensor]]) -> Tensor:
    """uint8 [bytes of the places], from the next weights, on their device."""
    chunk, used = torch.empty(0, dtype=torch.uint8), 0
    for place in places:
        name, tensor = next(weights)
        assert Place(name, tensor.dtype, tuple(tensor.shape), 0) == place, f"{name} is not what was announced: {place}"
        if not used and not len(chunk):
            chunk = torch.empty(sum(map(nbytes, places)), dtype=torch.uint8, device=tensor.device)
        chunk[used : used + tensor.nbytes] = flat_bytes(tensor)
        used += tensor.nbytes
    return chunk
