"""Rewards of a process reward model: every step of a response has a probability of being right, and the sample has one number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.config.sections import Steps
from conveyor.data.packing import lay_out
from conveyor.data.steps import step_ends
from conveyor.models.attention import packs
from conveyor.models.scalar_model import scores_at
from conveyor.types import Tokens

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": torch.min,
    "mean": torch.mean,
    "product": torch.prod,
    "last": lambda steps: steps[-1],
}
"""From the probabilities [K] of a sample's steps to its reward (Lightman et al. 2023, arXiv 2305.20050, appendix F)."""


def process_scores(
    model: PreTrainedModel, samples: Sequence[tuple[Sequence[int], Sequence[int]]], settings: Steps, separator_ids: Sequence[int], end: int
) -> Tensor:
    """float32 [B]: the aggregate of σ(score) at the end of each step.

    Args:
        samples: (prompt's ids, response's ids) of each.
        separator_ids: of the text that ends a step.
        end: the EOS token, which is part of no step. A response that is nothing else has one step.
    """
    places = []
    for prompt, response in samples:
        steps = response[:-1] if len(response) > 1 and response[-1] == end else response
        places.append([len(prompt) + place for place in step_ends(steps, separator_ids)])
    tokens = lay_out([[*prompt, *response] for prompt, response in samples], packs(model))
    right = step_scores(model, tokens, places).sigmoid()
    aggregate = AGGREGATES[settings.aggregate]
    return torch.stack([aggregate(of_sample) for of_sample in right.split([len(of_sample) for of_sample in places])])


def step_scores(model: PreTrainedModel, tokens: Tokens, places: Sequence[Sequence[int]]) -> Tensor:
    """float32 [K]: the scores at some places of each sample, sample by sample; a place counts from the sample's first token."""
    where = next(model.parameters()).device
    starts = tokens.starts.repeat_interleave(torch.tensor([len(of_sample) for of_sample in places]))
    columns = torch.tensor([place for of_sample in places for place in of_sample])
    return scores_at(model, tokens.to(where), (starts + columns).to(where))
