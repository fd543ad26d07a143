"""Prompt and response of samples joined for a forward pass, and back again.

    prompt   response           tokens, packed           response space
    1 5 6    7 8 2       ──▶    1 5 6 7 8 2 1 5 9        7 8 2
    1 5      9                                           9 0 0

The mask of the response space is True where the policy sampled; tools' and environments' tokens between are in `tokens` only.
`TrainBatch` has the same layout, with everything training needs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conveyor.data.packing import lay_out
from conveyor.models.routing import place_experts
from conveyor.types import Rollout, Tokens


@dataclass(frozen=True, slots=True)
class Joined:
    """Samples together; the letters are those of `conveyor.types`."""

    tokens: Tokens
    prompt_lengths: Tensor
    """int64 [B]"""
    response_mask: Tensor
    """bool [B, S]: True for response tokens that the policy sampled."""

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B]: R of each sample, tokens that were not sampled included."""
        return self.tokens.lengths - self.prompt_lengths

    def to(self, device: torch.device | str) -> Joined:
        return Joined(*(getattr(self, name).to(device) for name in self.__slots__))


def join(rollouts: Sequence[Rollout], packed: bool) -> Joined:
    """The samples, in their order. `packed`: in one row."""
    tokens = lay_out([(*rollout.prompt.token_ids, *rollout.response_ids.tolist()) for rollout in rollouts], packed)
    tokens = replace(tokens, experts=place_experts(tokens, [rollout.experts for rollout in rollouts]))
    response_mask = torch.nn.utils.rnn.pad_sequence([rollout.sampled_mask for rollout in rollouts], batch_first=True)
    return Joined(tokens, torch.tensor([len(rollout.prompt.token_ids) for rollout in rollouts]), response_mask)


def per_sample(values: Tensor, batch: Joined) -> tuple[Tensor, ...]:
    """Rows of [B, S] without their padding, on the CPU: [R] each, as long as `response_ids` and 0 where that was not sampled, with a
    storage of their own, so that sending one sends no more."""
    values, lengths = values.float().cpu(), batch.response_lengths.tolist()
    return tuple(row[:length].clone() for row, length in zip(values, lengths, strict=True))
