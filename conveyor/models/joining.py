"""Prompt and response side by side in one padded batch, and back again.

    prompt   response           input_ids            response space
    1 5 6    7 8 2       ──▶    1 5 6 7 8 2          7 8 2
    1 5      9                  1 5 9 0 0 0          9 0 0

The mask of the response space is True where the policy sampled; tools' and environments' tokens between are in `input_ids` only.
`TrainBatch` has the same layout, with everything training needs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conveyor.types import Rollout


@dataclass(frozen=True, slots=True)
class Joined:
    """Samples padded on the right; the letters are those of `conveyor.types`."""

    input_ids: Tensor
    """int64 [B, T]"""
    attention_mask: Tensor
    """int64 [B, T]"""
    prompt_lengths: Tensor
    """int64 [B]"""
    response_mask: Tensor
    """bool [B, S]: True for response tokens that the policy sampled."""

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B]: R of each sample, tokens that were not sampled included."""
        return self.attention_mask.sum(1) - self.prompt_lengths

    def to(self, device: torch.device | str) -> Joined:
        return Joined(*(getattr(self, name).to(device) for name in self.__slots__))


def join(rollouts: Sequence[Rollout]) -> Joined:
    """One batch of the samples, in their order."""
    input_ids, attention_mask = pad_right(
        [torch.cat([torch.tensor(rollout.prompt.token_ids, dtype=torch.int64), rollout.response_ids]) for rollout in rollouts]
    )
    response_mask = torch.nn.utils.rnn.pad_sequence([rollout.sampled_mask for rollout in rollouts], batch_first=True)
    return Joined(input_ids, attention_mask, torch.tensor([len(rollout.prompt.token_ids) for rollout in rollouts]), response_mask)


def pad_right(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(ids, mask), int64 [B, T] both: rows of ids [·] padded with 0, and 1 where they are real."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def per_sample(values: Tensor, batch: Joined) -> tuple[Tensor, ...]:
    """Rows of [B, S] without their padding, on the CPU: [R] each, as long as `response_ids` and 0 where that was not sampled, with a
    storage of their own, so that sending one sends no more."""
    values, lengths = values.float().cpu(), batch.response_lengths.tolist()
    return tuple(row[:length].clone() for row, length in zip(values, lengths, strict=True))
