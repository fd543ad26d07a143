"""Weights over gloo, chunk by chunk, between threads that are ranks of groups of their own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from conveyor.workers.outgoing import Outgoing
from conveyor.workers.weight_stream import GlooGroup, Sender, announce, chunks, layout_of, nbytes, update_info
from conveyor.workers.weight_sync import Place, checksum, views

WEIGHTS = {
    "embed": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "norm": torch.arange(5, dtype=torch.bfloat16),
    "scale": torch.tensor(1.5, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.empty(0),
    "last": torch.ones(4),
}
SIZES = {"embed": 84, "norm": 10, "scale": 2, "transposed": 24, "empty": 0, "last": 16}


def gathered() -> Iterator[tuple[str, Tensor]]:
    """Tensors that die when the next is asked for."""
    for name, tensor in WEIGHTS.items():
        alive = tensor.clone()
        yield name, alive
        alive.zero_()


def receive(port: int, layout: tuple[Place, ...], rank: int, size: int) -> dict[str, Tensor]:
    group, found = GlooGroup("127.0.0.1", port, rank, size), dict[str, Tensor]()
    for places in chunks(layout):
        chunk = torch.empty(sum(map(nbytes, places)), dtype=torch.uint8)
        group.broadcast(chunk)
        group.wait()
        for place in places:
            found |= dict(views([place], chunk[: nbytes(place)].clone()))
            chunk = chunk[nbytes(place) :]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_chunk_ends_with_the_tensor_that_takes_it_over_the_limit() -> None:
    """As vLLM packs: 84 bytes are over 80; 10 + 2 + 24 + 0 + 16 are not."""
    layout = layout_of(gathered())
    assert {place.name: nbytes(place) for place in layout} == SIZES
    assert [[place.name for place in places] for places in chunks(layout, 80)] == [
        ["embed"],
        ["norm", "scale", "transposed", "empty", "last"],
    ]
    assert [[place.name for place in places] for places in chunks(layout, 84)] == [
        ["embed", "norm"],
        ["scale", "transposed", "empty", "last"],
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 90, 10_000])
def test_two_engines_of_two_processes_get_what_one_pass_sends(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conveyor.workers.weight_stream.CHUNK_BYTES", chunk_bytes)
    layout, ports, sender = layout_of(gathered()), [free_port(), free_port()], Sender("gloo")
    with ThreadPoolExecutor(4) as threads:
        received = [threads.submit(receive, port, layout, rank, 3) for port in ports for rank in (1, 2)]
        for engine, port in enumerate(ports):
            sender.open(engine, "127.0.0.1", port, 3)
        sender.send(gathered(), layout, [0, 1, 5])  # another rank serves engine 5
        for future in received:
            found = future.result(timeout=60)
            assert found.keys() == WEIGHTS.keys()
            assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_what_is_announced_can_be_checked_and_sent_until_it_changes() -> None:
    layout = layout_of(gathered())
    announced = announce(gathered(), layout, 4, "actor", verify=True)
    assert announced.checksums == {name: checksum(tensor) for name, tensor in WEIGHTS.items()}
    assert (announced.version, announced.buckets, announced.nbytes) == (4, (), sum(SIZES.values()))
    assert update_info(layout)["dtype_names"] == ["float32", "bfloat16", "bfloat16", "float32", "float32", "float32"]
    outgoing, walks = Outgoing(0, verify=False), list[int]()

    def walk() -> Iterator[tuple[str, Tensor]]:
        walks.append(1)
        return gathered()

    published = outgoing.publish(walk, 4, "actor", stored=False)
    assert published is not None and published.layout == layout and len(walks) == 1
    outgoing.send(walk, 4, "actor", [0])  # served by another rank: takes part in gathering
    assert len(walks) == 2
    outgoing.changed()
    with pytest.raises(AssertionError, match="version 4 was asked for when it had changed"):
        outgoing.send(walk, 4, "actor", [0])
    assert Outgoing(1, verify=False).publish(walk, 4, "actor", stored=False) is None


def test_a_tensor_that_was_not_announced_is_named() -> None:
    layout = layout_of([("embed", torch.zeros(3, 7)), *list(gathered())[1:]])
    sender = Sender("gloo")
    sender._groups[0] = object()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="embed is not what was announced"):
        sender.send(gathered(), layout, [0])
