"""A cluster in words, `4x8:80`, and what lies on its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conveyor.config import UserError

USUAL_GIB = 80.0
MOST_GPUS = 65_536


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with GPUs of one kind."""

    nodes: tuple[int, ...]
    """GPUs of each."""
    gib: float = USUAL_GIB
    """Memory of one GPU, GiB."""

    @property
    def gpus(self) -> int:
        return sum(self.nodes)

    def __str__(self) -> str:
        alike = len(set(self.nodes)) == 1
        nodes = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
        each = f" × {self.nodes[0]} GPU{'s' if self.nodes[0] > 1 else ''}" if alike else f" with {' + '.join(map(str, self.nodes))} GPUs"
        return f"{nodes}{each} of {self.gib:g} GiB"


def parse_cluster(text: str) -> Cluster:
    """`NODESxGPUS`, or `NODESxGPUS:GIB` for GPUs of another size than 80 GiB. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})(?::(\d+(?:\.\d+)?))?", text)
    if match is None or not 1 <= int(match[1]) * int(match[2]) <= MOST_GPUS or (match[3] and not float(match[3])):
        raise UserError(
            f"--cluster: {text!r}: say nodes x GPUs of each, such as 4x8, with their memory in GiB if it is not 80: 4x8:141; or ray"
        )
    return Cluster((int(match[2]),) * int(match[1]), float(match[3] or USUAL_GIB))


def told(places: Mapping[str, Sequence[int]], slots: Mapping[str, Sequence[float]], nodes: int) -> list[str]:
    """`node 0: rollout 8`, one line a node; of many that are alike only the first."""
    lines: dict[str, list[int]] = {}
    for node in range(nodes):
        own = {group: sum(size for place, size in zip(places[group], slots[group], strict=True) if place == node) for group in places}
        text = ", ".join(f"{group} {amount:g}" for group, amount in own.items() if amount) or "nothing"
        lines.setdefault(text, []).append(node)
    return [f"{_nodes(which)}: {text}" for text, which in lines.items()]


def _nodes(which: list[int]) -> str:
    """`node 0` or `nodes 1–3`."""
    if len(which) == 1:
        return f"node {which[0]}"
    if which == list(range(which[0], which[-1] + 1)):
        return f"nodes {which[0]}–{which[-1]}"
    return f"nodes {', '.join(map(str, which))}"
