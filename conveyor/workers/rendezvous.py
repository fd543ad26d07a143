"""Where ranks meet that work as one. Beside nothing that loads models: the process that looks for a port starts in a second."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from conveyor.workers.placement import Placement

ALONE = ("127.0.0.1", 0)
"""A rank without others listens on any free port of its own."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place among those that meet at an address and port; rank 0 listens there."""

    rank: int
    ranks: int
    address: str
    port: int


class _Door:
    """Finds, on the node of rank 0, an address and port."""

    def find(self) -> tuple[str, int]:
        return free_door()


def free_door() -> tuple[str, int]:
    """(address, port) of this node, where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def rendezvous(placement: Placement, group: str) -> tuple[str, int]:
    """(address, port) where rank 0 of a group shall listen."""
    if placement.slots(group) == 1:
        return ALONE
    door = placement.actor(_Door, group, 0, share=0.0)
    found: tuple[str, int] = ray.get(door.find.remote())
    ray.kill(door)
    return found
