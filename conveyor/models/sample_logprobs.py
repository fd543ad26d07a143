"""Log-probabilities of whole completions, many samples in one pass with next to no padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.data.packing import pack_samples
from conveyor.data.samples import Sample
from conveyor.models.language_model import target_logprobs


def sample_logprobs(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """float32 [n]: log π of each sample's masked tokens given all before them, summed over the tokens.

    The samples are packed into rows as long as the longest of them, each attending to itself only.
    """
    packed = pack_samples(samples)
    where = next(model.parameters()).device
    logprobs = target_logprobs(model, packed.batch.to(where))
    return logprobs.new_zeros(len(samples)).index_add(0, packed.owners.to(where), logprobs)


def loss_tokens(samples: Sequence[Sample]) -> Tensor:
    """int64 [n]: masked tokens of each sample."""
    return torch.tensor([sample.loss_tokens for sample in samples])
