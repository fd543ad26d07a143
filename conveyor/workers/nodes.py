"""Which node each slot of the device groups goes to: decided here, so that Ray reserves all of them at once, or none.

A group has a strategy:

| strategy      | its slots                                                                                 |
|---------------|-------------------------------------------------------------------------------------------|
| pack          | on one node if there is room, else on as few as can be, filled one after the other        |
| spread        | dealt out over the nodes, evenly                                                          |
| strict_pack   | on one node, or the run is refused                                                        |
| strict_spread | each on a node of its own, or the run is refused                                          |

A slot is never divided: an engine's tensor-parallel devices are always of one node. Free of Ray.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from conveyor.config.sections import Strategy

EXACT = 1e-6
"""Fractions of devices are sums of decimals."""
ORDERS = 720
"""Orders of the groups that are tried: all of six groups."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    """Its address, for people."""
    devices: float
    free: float
    """Not reserved by anyone."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device group."""

    group: str
    slots: tuple[float, ...]
    """Devices of each."""
    strategy: Strategy = "pack"

    @property
    def total(self) -> float:
        return sum(self.slots)


@dataclass(slots=True)
class _Room:
    """What is left of a node."""

    node: Node
    whole: int
    """Devices nobody has a part of."""
    parts: list[float] = field(default_factory=list)
    """Free parts of devices that are shared, one entry a device."""

    @classmethod
    def of(cls, node: Node) -> _Room:
        whole = math.floor(node.free + EXACT)
        part = node.free - whole
        return cls(node, whole, [part] if part > EXACT else [])

    @property
    def free(self) -> float:
        return self.whole + sum(self.parts)

    def take(self, amount: float) -> bool:
        """Whether there was room: for a part of a device on one of them, the fullest that has it."""
        if amount >= 1:
            taken = amount <= self.whole
            self.whole -= round(amount) if taken else 0
            return taken
        fitting = [part for part in self.parts if part + EXACT >= amount]
        if fitting:
            self.parts.remove(min(fitting))
        elif not self.whole:
            return False
        self.whole -= not fitting
        self.parts.append(min(fitting, default=1.0) - amount)
        return True

    def takes_all(self, slots: Sequence[float]) -> bool:
        """Takes all of them, or none."""
        whole, parts = self.whole, list(self.parts)
        if all(self.take(amount) for amount in slots):
            return True
        self.whole, self.parts = whole, parts
        return False


def assign(wanted: Sequence[Wanted], nodes: Sequence[Node]) -> dict[str, list[str]] | None:
    """Group → id of the node of each slot; None: there is no room. Neighbouring slots (ranks) are on one node where they can be.

    Groups that are hard to place come first; where that fails, other orders of them are tried.
    """
    hardest_first = sorted(wanted, key=lambda group: (not group.strategy.startswith("strict"), -max(group.slots), -group.total))
    for order in itertools.islice(itertools.permutations(hardest_first), ORDERS):
        rooms = [_Room.of(node) for node in nodes]
        found = {group.group: _place(group, rooms) for group in order}
        if all(places is not None for places in found.values()):
            return {group.group: list(found[group.group] or ()) for group in wanted}
    return None


def _place(wanted: Wanted, rooms: list[_Room]) -> list[str] | None:
    """Takes the room of a group; None: it has not enough."""
    match wanted.strategy:
        case "pack" | "strict_pack":
            for room in sorted(rooms, key=lambda room: room.free):  # the fullest that has room, which leaves the others whole
                if room.takes_all(wanted.slots):
                    return [room.node.id] * len(wanted.slots)
            return _fill(wanted.slots, rooms) if wanted.strategy == "pack" else None
        case "spread" | "strict_spread":
            return _deal_out(wanted.slots, rooms, most=1 if wanted.strategy == "strict_spread" else len(wanted.slots))


def _fill(slots: Sequence[float], rooms: list[_Room]) -> list[str] | None:
    """The emptiest nodes first, so that they are few."""
    places: list[str] = []
    for room in sorted(rooms, key=lambda room: -room.free):
        while len(places) < len(slots) and room.take(slots[len(places)]):
            places.append(room.node.id)
    return places if len(places) == len(slots) else None


def _deal_out(slots: Sequence[float], rooms: list[_Room], most: int) -> list[str] | None:
    has: Counter[str] = Counter()
    for amount in slots:
        for room in sorted(rooms, key=lambda room: (has[room.node.id], -room.free)):
            if has[room.node.id] < most and room.take(amount):
                has[room.node.id] += 1
                break
        else:
            return None
    return [node for room in rooms for node in [room.node.id] * has[room.node.id]]


def unfit(wanted: Sequence[Wanted], nodes: Sequence[Node], devices: str) -> str | None:
    """Why the groups fit on no nodes like these, all of them free; None: they do. `devices`: what they are, `GPUs`."""
    nodes = [replace(node, free=node.devices) for node in nodes]
    if assign(wanted, nodes) is not None:
        return None
    largest = max(nodes, key=lambda node: node.devices)
    has = f"the largest, {largest.name}, has {largest.devices:g}"
    for group in wanted:
        slot = max(group.slots)
        if slot > largest.devices + EXACT:
            return f"devices.{group.group}: one worker needs {slot:g} {devices} of one node; {has}"
        if assign([group], nodes) is None:
            if group.strategy == "strict_pack":
                return f"ray.placement.{group.group}: strict_pack needs {group.total:g} {devices} on one node; {has}"
            if group.strategy == "strict_spread":
                able = sum(node.devices + EXACT >= slot for node in nodes)
                return (
                    f"ray.placement.{group.group}: strict_spread needs {len(group.slots)} nodes with {slot:g} {devices} each; {able} have"
                )
    return f"devices: no way to lay out {describe(wanted)} on the nodes: {listed(nodes)}"


def describe(wanted: Sequence[Wanted]) -> str:
    """`rollout: 2 × 8, spread; train: 16 × 1`"""
    parts = []
    for group in wanted:
        strategy = f", {group.strategy}" if group.strategy != "pack" else ""
        parts.append(f"{group.group}: {len(group.slots)} × {group.slots[0]:g}{strategy}")
    return "; ".join(parts)


def listed(nodes: Sequence[Node], free: bool = False) -> str:
    """`10.0.0.1 has 8, 10.0.0.2 has 4`, with `free`: `10.0.0.1 has 3 of 8 free`. Nodes that are alike are counted."""
    kinds = Counter((node.devices, node.free if free else node.devices) for node in nodes)
    parts = []
    for (devices, left), count in sorted(kinds.items(), reverse=True):
        who = next(node.name for node in nodes if (node.devices, node.free if free else node.devices) == (devices, left))
        holder = f"{count} nodes have" if count > 1 else f"{who} has"
        parts.append(f"{holder} {left:g} of {devices:g} free" if free else f"{holder} {devices:g}")
    return ", ".join(parts)


def strategies(groups: Mapping[str, Sequence[float]], placement: Mapping[str, Strategy]) -> list[Wanted]:
    """The groups with their strategies; those of other groups are left aside."""
    return [Wanted(group, tuple(slots), placement.get(group, "pack")) for group, slots in groups.items()]
