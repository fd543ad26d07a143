"""Models that give one number: reward models (a score per sequence) and critics (a value per state).

Both are Hugging Face sequence classifiers with one label: a backbone and a linear `score` layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.data.packing import PackedSamples
from conveyor.models.language_model import last_hidden, load_pretrained, spread, states_before


def load_scalar_model(model: sections.Model, new_head: bool = False) -> PreTrainedModel:
    """A sequence classifier with one label, on CPU, without dropout.

    Args:
        new_head: start from any model with a fresh head of zeros: every score is 0 at first, which for a critic
            is a better guess than noise.

    Raises:
        UserError: without `new_head`, the checkpoint has no head, or one with several labels.
    """
    labels = {"num_labels": 1} if new_head else {}
    loaded, info = load_pretrained(AutoModelForSequenceClassification, model, **labels, ignore_mismatched_sizes=new_head)
    missing = sorted(info["missing_keys"])
    if new_head:
        nn.init.zeros_(score_head(loaded).weight)
        missing = [name for name in missing if not name.startswith("score.")]
    if missing:
        raise UserError(
            f"{model.path}: this checkpoint has no {missing[0]}, so its scores would be random; train a reward model from it first"
        )
    if loaded.config.num_labels != 1:
        raise UserError(f"{model.path}: a score needs a classifier with one label, this one has {loaded.config.num_labels}")
    return loaded


def load_critic(recipe: OnlineRecipe) -> PreTrainedModel:
    """The critic a run starts with: the recipe's, or its model with a head of zeros."""
    return load_scalar_model(recipe.critic or recipe.model, new_head=recipe.critic is None)


def score_head(model: PreTrainedModel) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise UserError(f"{model.config.model_type} models have no linear score layer; use a decoder model")
    return head


def sequence_scores(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """float32 [B]: the score at each row's last real token. int64 [B, T] twice, padded left or right."""
    hidden = last_hidden(model, input_ids, attention_mask)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (places * attention_mask).argmax(1)
    return score_head(model)(hidden[torch.arange(len(last), device=last.device), last]).squeeze(-1).float()


def packed_scores(model: PreTrainedModel, packed: PackedSamples, places: Sequence[Sequence[int]]) -> Tensor:
    """float32 [K]: the scores at some places of each sample, sample by sample; a place counts from the sample's first token."""
    where = next(model.parameters()).device
    counts = torch.tensor([len(of_sample) for of_sample in places])
    rows, starts = packed.rows.repeat_interleave(counts), packed.starts.repeat_interleave(counts)
    columns = starts + torch.tensor([place for of_sample in places for place in of_sample])
    batch = packed.batch.to(where)
    hidden = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    return score_head(model)(hidden[rows.to(where), columns.to(where)]).squeeze(-1).float()


def response_values(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor, response_mask: Tensor
) -> Tensor:
    """float32 [B, S]: the value of the state before each response token, 0 where masked.

    Arguments as of `response_logprobs`: int64 [B, T] twice, int64 [B], bool [B, S]; padding is on the right.
    """
    hidden, _ = states_before(last_hidden(model, input_ids, attention_mask), prompt_lengths, response_mask)
    return spread(score_head(model)(hidden).squeeze(-1).float(), response_mask)
