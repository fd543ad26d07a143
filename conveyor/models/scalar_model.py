"""Models that give one number: reward models (a score per sequence) and critics (a value per state).

Both are Hugging Face sequence classifiers with one label: a backbone and a linear `score` layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from conveyor.errors import UserError
from conveyor.models.language_model import load_pretrained, read_states, response_places, spread
from conveyor.models.zero import whole
from conveyor.types import Tokens

if TYPE_CHECKING:
    from conveyor.config import OnlineRecipe, sections


def load_scalar_model(model: sections.Model, new_head: bool = False, lora: sections.Lora | None = None) -> PreTrainedModel:
    """A sequence classifier with one label, on CPU, without dropout.

    Args:
        new_head: start from any model with a fresh head of zeros: every score is 0 at first, which for a critic
            is a better guess than noise.
        lora: see `load_language_model`.

    Raises:
        UserError: without `new_head`, the checkpoint has no head, or one with several labels.
    """
    labels = {"num_labels": 1} if new_head else {}
    loaded, info = load_pretrained(AutoModelForSequenceClassification, model, lora, **labels, ignore_mismatched_sizes=new_head)
    missing = sorted(info["missing_keys"])
    if new_head:
        head = score_head(loaded)
        with whole(head.parameters(), write=True):
            nn.init.zeros_(head.weight)
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
    return load_scalar_model(recipe.critic or recipe.model, new_head=recipe.critic is None, lora=recipe.lora)


def score_head(model: PreTrainedModel) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise UserError(f"{model.config.model_type} models have no linear score layer; use a decoder model")
    return head


def sequence_scores(model: PreTrainedModel, tokens: Tokens) -> Tensor:
    """float32 [B]: the score at each sample's last token."""
    return scores_at(model, tokens, tokens.starts + tokens.lengths - 1)


def scores_at(model: PreTrainedModel, tokens: Tokens, places: Tensor) -> Tensor:
    """float32 [N]: the scores at places [N] of `Tokens`."""
    head = score_head(model)
    (scores,) = read_states(model, tokens, places, lambda hidden, _: (head(hidden).squeeze(-1).float(),))
    return scores


def response_values(model: PreTrainedModel, tokens: Tokens, prompt_lengths: Tensor, response_mask: Tensor) -> Tensor:
    """float32 [B, S]: the value of the state before each response token, 0 where masked.

    Arguments as of `response_logprobs`: int64 [B], bool [B, S].
    """
    return spread(scores_at(model, tokens, response_places(tokens, prompt_lengths, response_mask) - 1), response_mask)
