"""Log-probabilities of completions, many samples in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.data.packing import lay_out
from conveyor.data.samples import Sample
from conveyor.models.attention import packs
from conveyor.models.language_model import target_logprobs


def sample_logprobs(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """float32 [n]: log π of each sample's masked tokens given all before them, summed over the tokens."""
    logprobs, owners = completion_logprobs(model, samples)
    return logprobs.new_zeros(len(samples)).index_add(0, owners, logprobs)


def completion_logprobs(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Of every masked token, sample by sample: float32 [N] log-probabilities, and int64 [N] the sample's number."""
    where = next(model.parameters()).device
    tokens = lay_out([sample.ids for sample in samples], packs(model))
    masked = [np.flatnonzero(sample.mask) for sample in samples]
    owners = torch.from_numpy(np.repeat(np.arange(len(samples)), [len(places) for places in masked]))
    places = tokens.starts[owners] + torch.from_numpy(np.concatenate(masked))
    return target_logprobs(model, tokens.to(where), places.to(where)), owners.to(where)


def loss_tokens(samples: Sequence[Sample]) -> Tensor:
    """int64 [n]: masked tokens of each sample."""
    return torch.tensor([sample.loss_tokens for sample in samples])
