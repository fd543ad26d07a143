"""Rewards of a process reward model: every step of a response has a probability of being right, and the sample has one number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.config.sections import Steps
from conveyor.data.packing import pack_samples
from conveyor.data.samples import Sample
from conveyor.data.steps import step_ends
from conveyor.models.scalar_model import packed_scores

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
    rows = [np.array([*prompt, *response], dtype=np.int32) for prompt, response in samples]
    packed = pack_samples([Sample(ids, np.zeros(len(ids), dtype=np.bool_), "") for ids in rows])
    right = packed_scores(model, packed, places).sigmoid()
    aggregate = AGGREGATES[settings.aggregate]
    return torch.stack([aggregate(of_sample) for of_sample in right.split([len(of_sample) for of_sample in places])])
