"""Packing: whole samples one after another in a row, each attending to itself only (`models/attention.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from conveyor.types import Tokens


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


def lay_out(samples: Sequence[Any], packed: bool) -> Tokens:
    """Samples ready for a forward pass.

    Args:
        samples: token ids [T] of each, as arrays, tensors or lists.
        packed: in one row without padding, else each in a row of its own.
    """
    rows = [np.asarray(ids, dtype=np.int64) for ids in samples]
    lengths = np.array([len(ids) for ids in rows])
    assert len(rows) and lengths.min() > 0, "a sample without tokens"
    ends = lengths.cumsum()
    if packed:
        starts = ends - lengths
        input_ids = np.concatenate(rows)[None]
        position_ids = (np.arange(ends[-1]) - np.repeat(starts, lengths))[None]
    else:
        width = int(lengths.max())
        starts = np.arange(len(rows)) * width
        input_ids = np.zeros((len(rows), width), dtype=np.int64)
        input_ids.reshape(-1)[np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)] = np.concatenate(rows)
        position_ids = np.broadcast_to(np.arange(width), input_ids.shape).copy()
    return Tokens(
        torch.from_numpy(input_ids), torch.from_numpy(position_ids), torch.from_numpy(starts), torch.from_numpy(lengths), packed
    )  # fmt: skip
