"""Packing: several whole samples in one row of at most `max_length` tokens, each attending to itself only.

A packed row is its samples one after another, with position ids that start at 0 for each. Transformers reads the restarts as
borders and builds the block-diagonal causal mask from them, provided it is given no attention mask and no cache. Padding
at a row's end repeats position 0, so every padding token is a block of its own. A row that is not packed has the same
form with one sample in it: there is one path for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conveyor.data.samples import Sample

Row = tuple[Sample, ...]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item numbers: items from longest to shortest, each into the first bin it fits in.

    Uses at most 11/9 of the fewest possible bins plus one (Johnson 1973); O(n log n) through a tree of the largest room left
    under each node. Ties keep their order, so the result depends on `lengths` alone.

    Raises:
        ValueError: an item is larger than a bin.
    """
    if any(length > capacity for length in lengths):
        raise ValueError(f"an item of {max(lengths)} does not fit into a bin of {capacity}")
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < lengths[item]
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= lengths[item]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def pack(samples: Sequence[Sample], max_length: int) -> list[Row]:
    """Rows that hold every sample once, none cut."""
    return [tuple(samples[item] for item in items) for items in first_fit_decreasing([len(s.ids) for s in samples], max_length)]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows ready for a forward pass without attention mask."""

    input_ids: Tensor
    """int64 [B, T]"""
    position_ids: Tensor
    """int64 [B, T]: starts at 0 for each sample and for each padding token."""
    loss_mask: Tensor
    """bool [B, T]: True where the token is a target, predicted at the position before; False for each sample's first token."""

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(self.input_ids.to(device), self.position_ids.to(device), self.loss_mask.to(device))


def collate(rows: Sequence[Row], pad_token_id: int) -> PackedBatch:
    """Rows side by side, padded on the right to the longest."""
    width = max(sum(len(sample.ids) for sample in row) for row in rows)
    ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.bool_)
    for i, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.ids)
            ids[i, start:end], positions[i, start:end], mask[i, start:end] = sample.ids, np.arange(end - start), sample.mask
            start = end
    return PackedBatch(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(mask))
