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


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples in packed rows, and where each of them is."""

    batch: PackedBatch
    owners: Tensor
    """int64 [N]: for each target of the batch, row by row, the number of the sample it belongs to."""
    rows: Tensor
    """int64 [n]: the row of each sample."""
    starts: Tensor
    """int64 [n]: the column of its first token."""


def pack_samples(samples: Sequence[Sample], max_length: int | None = None, pad_token_id: int = 0) -> PackedSamples:
    """Samples in as few rows of `max_length` tokens as first-fit decreasing finds; default: as long as the longest of them."""
    lengths = [len(sample.ids) for sample in samples]
    return place_samples(samples, first_fit_decreasing(lengths, max_length or max(lengths)), pad_token_id)


def place_samples(samples: Sequence[Sample], bins: Sequence[Sequence[int]], pad_token_id: int = 0) -> PackedSamples:
    """Samples in the rows that `bins` says, padded on the right to the longest."""
    width = max(sum(len(samples[item].ids) for item in items) for items in bins)
    ids = np.full((len(bins), width), pad_token_id, dtype=np.int64)
    positions, owners = np.zeros((2, len(bins), width), dtype=np.int64)
    mask = np.zeros((len(bins), width), dtype=np.bool_)
    rows, starts = np.zeros((2, len(samples)), dtype=np.int64)
    for row, items in enumerate(bins):
        start = 0
        for item in items:
            sample = samples[item]
            end = start + len(sample.ids)
            rows[item], starts[item] = row, start
            ids[row, start:end], positions[row, start:end] = sample.ids, np.arange(end - start)
            mask[row, start:end], owners[row, start:end] = sample.mask, item
            start = end
    batch = PackedBatch(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(mask))
    return PackedSamples(batch, torch.from_numpy(owners[:, 1:][mask[:, 1:]]), torch.from_numpy(rows), torch.from_numpy(starts))


def collate(rows: Sequence[Row], pad_token_id: int) -> PackedBatch:
    """Rows side by side, padded on the right to the longest."""
    samples = [sample for row in rows for sample in row]
    ends = np.cumsum([len(row) for row in rows]).tolist()
    bins = [range(end - len(row), end) for row, end in zip(rows, ends, strict=True)]
    return place_samples(samples, bins, pad_token_id).batch
