"""A key-value cache whose rows belong to sequences that come and go, in the form that transformers' models take.

                  columns: the sequence's tokens, from its first ──▶          room
    slot 0   k k k k k k k · · · · · · · · · │ · · · · · · · ·      ·  garbage that no token attends to
    slot 1   k k k k k k k k k k k · · · · · │ · · · · · · · ·
    slot 2   k k k · · · · · · · · · · · · · │ · · · · · · · ·      │  what a step reads: the longest, rounded up

A token's column is its place in its own sequence, whatever the others are. transformers' `DynamicCache` keeps all rows of
one length, padded on the left, so that a row that joins or leaves moves the others' columns, and every step copies it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

COLUMNS = 32
"""Columns are read in multiples of this. A sum over more columns that are masked is then the same sum, bit for bit, as vectors of
the CPU's instructions are never filled in part: seen with AVX2."""


@dataclass(slots=True)
class Places:
    """Where the tokens of the forward pass that comes next belong, the same in all layers."""

    slots: Tensor | None = None
    """int64 [P]: whole beginnings of sequences, from column 0. None: one token for each of the first slots."""
    columns: Tensor | None = None
    """int64 [n]: of one token a slot."""
    in_use: int = 0
    """Slots, those of the new tokens among them."""
    width: int = 0
    """Columns that are read, those of the new tokens among them."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, room, size], made as large as is needed."""

    is_sliding = False
    """All keys are kept; a sliding window is the mask's."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (states.new_zeros(0, states.shape[1], 0, states.shape[3]) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[P, heads, Q, size] of beginnings → themselves, kept; [n, heads, 1, size] of one token a slot → [n, heads, width, size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        places = self._places
        rows = places.in_use
        self.keys, self.values = (_with_room(buffer, rows, places.width) for buffer in (self.keys, self.values))
        if places.slots is not None:
            self.keys[places.slots, :, : key_states.shape[2]] = key_states
            self.values[places.slots, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        slots = torch.arange(rows, device=key_states.device)
        self.keys[slots, :, places.columns] = key_states[:, :, 0]
        self.values[slots, :, places.columns] = value_states[:, :, 0]
        return self.keys[:rows, :, : places.width], self.values[:rows, :, : places.width]

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first columns of a slot, to others."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (_with_room(buffer, max(targets) + 1, columns) for buffer in (self.keys, self.values))
        for buffer in (self.keys, self.values):
            buffer[list(targets), :, :columns] = buffer[source, :, :columns].clone()

    def reset(self) -> None:
        """Forget everything, and give the memory back: not even a NaN of old weights stays, that a mask would not keep out."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """transformers asks this where it makes the mask itself: of beginnings, which attend to nothing but themselves."""
        return (query_length, 0) if self._places.slots is not None else (self._places.width, 0)

    def get_seq_length(self) -> int:
        return 0 if self._places.slots is not None else max(self._places.width - 1, 0)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The layers of a model, and `places`, which is to be set before each of its forward passes."""

    def __init__(self, layers: int) -> None:
        self.places = Places()
        self._slot_layers = [SlotLayer(self.places) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first `columns` of a slot, to others."""
        for layer in self._slot_layers:
            layer.copy(source, targets, columns)


def _with_room(buffer: Tensor, slots: int, columns: int) -> Tensor:
    """The buffer, or a larger one with its content: half as much again, so that growing costs little."""
    have_slots, heads, have_columns, size = buffer.shape
    if slots <= have_slots and columns <= have_columns:
        return buffer
    new_slots = have_slots if slots <= have_slots else max(slots, have_slots * 3 // 2)
    new_columns = have_columns if columns <= have_columns else -(-max(columns, have_columns * 3 // 2) // COLUMNS) * COLUMNS
    larger = buffer.new_zeros(new_slots, heads, new_columns, size)
    larger[:have_slots, :, :have_columns] = buffer
    return larger
