"""Causal language models, and the log-probabilities of the responses they are given."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor.config import UserError, sections
from conveyor.data.packing import PackedBatch

CHUNK_LOGITS = 2**26
"""Logits held at a time, in fp32 256 MiB."""


class TokenHead(nn.Linear):
    """A language model's output layer that can also give log-probabilities of chosen tokens, without
    ever holding the logits of all of them.

    It is one module, called once, whatever the number of tokens: under ZeRO-3 a call gathers the weight,
    so ranks with different numbers of chunks would wait for each other forever.
    """

    @classmethod
    def over(cls, linear: nn.Linear) -> TokenHead:
        """The same layer, with the same parameters."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        if linear.bias is not None:
            head.bias = linear.bias
        return head

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor | None = None,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        chunk: int | None = None,
        entropy: bool = True,
    ) -> Any:
        """hidden [..., H] → logits [..., V]; with `ids` int64 [N], hidden [N, H] → (log-probs [N], entropies [N]), float32.

        Without `entropy`, which is two more passes over [N, V], a tuple of the log-probs alone.
        """
        if ids is None:
            return super().forward(hidden)
        chunk = chunk or max(1, CHUNK_LOGITS // self.out_features)
        scored = partial(_logprobs_entropy, entropy_grad=entropy_grad) if entropy else _logprobs
        if len(ids) <= chunk:
            return scored(hidden, ids, self.weight, self.bias, temperature)
        parts = [
            checkpoint(scored, *part, self.weight, self.bias, temperature, use_reentrant=False)
            for part in zip(hidden.split(chunk), ids.split(chunk), strict=True)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def load_language_model(model: sections.Model) -> PreTrainedModel:
    """A causal language model, on CPU, in float32 or bfloat16, without dropout.

    Raises:
        UserError: the folder or hub id holds no causal language model.
    """
    loaded, info = load_pretrained(AutoModelForCausalLM, model)
    if info["missing_keys"]:
        raise UserError(f"model.path: {model.path}: not a causal language model: it has no {sorted(info['missing_keys'])[0]}")
    head = loaded.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"model.path: {model.path}: its output layer is {type(head).__name__}, only linear ones are supported")
    loaded.set_output_embeddings(TokenHead.over(head))
    return loaded


def load_pretrained(auto_class: Any, model: sections.Model, **settings: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`auto_class.from_pretrained` with a recipe's settings → (model, transformers' loading info).

    Dropout is off: log-probs of the same weights are to be the same wherever they are computed.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        loaded, info = auto_class.from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), attn_implementation=model.attention, output_loading_info=True, **settings
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model.path: {model.path}: cannot be loaded as a model: {str(error).strip().splitlines()[0]}") from error
    finally:
        logging.set_verbosity(verbosity)
    _remove_dropout(loaded)
    loaded.eval()
    if model.gradient_checkpointing:
        loaded.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.train()  # transformers recomputes activations in training mode only
    return loaded, info


def _remove_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def positions(attention_mask: Tensor) -> Tensor:
    """int64 [B, T]: places counted from the first real token, so that padding, left or right, changes nothing."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def last_hidden(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states [B, T, H] that the output layer reads; one pass of the backbone."""
    outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions(attention_mask), use_cache=False)
    return outputs.last_hidden_state


def states_before(hidden: Tensor, prompt_lengths: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [N, H] of the N places before the response tokens, and those places' rows [N] and columns [N].

    The state before response token t of a row stands at column prompt_length − 1 + t.
    """
    rows, tokens = response_mask.nonzero(as_tuple=True)
    columns = prompt_lengths[rows] - 1 + tokens
    return hidden[rows, columns], torch.stack((rows, columns))


def response_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_lengths: Tensor,
    response_mask: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every response token under softmax(logits / temperature), and that distribution's entropy in nats.

    Only states before response tokens meet the output layer, `chunk` tokens at a time, and their logits are
    computed again in the backward pass: memory grows neither with prompt_length × V nor with tokens × V.
    Padding is on the right.

    Args:
        input_ids, attention_mask: int64 [B, T].
        prompt_lengths: int64 [B].
        response_mask: bool [B, S].
        entropy_grad: the entropy is to have a gradient.

    Returns:
        float32 [B, S] twice, 0 where masked.
    """
    hidden, places = states_before(last_hidden(model, input_ids, attention_mask), prompt_lengths, response_mask)
    head = model.get_output_embeddings()
    head = head if isinstance(head, TokenHead) else TokenHead.over(head)
    ids = input_ids[places[0], places[1] + 1]
    logprobs, entropy = head(hidden, ids, temperature, entropy_grad, chunk)
    return spread(logprobs, response_mask), spread(entropy, response_mask)


def target_logprobs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """float32 [N]: log-probabilities of the N tokens in the loss, row by row. Only they meet the output layer."""
    hidden = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    targets = batch.loss_mask[:, 1:]
    head = model.get_output_embeddings()
    (logprobs,) = head(hidden[:, :-1][targets], batch.input_ids[:, 1:][targets], entropy=False)
    return logprobs


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """[N] → [B, S]: the values at the N True places of the mask, row by row; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _logprobs(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> tuple[Tensor]:
    """hidden [N, H], ids [N], weight [V, H] → log-probs [N]."""
    return (-F.cross_entropy(_scores(hidden, weight, bias, temperature), ids, reduction="none"),)


def _logprobs_entropy(
    hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """hidden [N, H], ids [N], weight [V, H] → log-probs [N], entropies [N]."""
    logprobs = torch.log_softmax(_scores(hidden, weight, bias, temperature), dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """float32 [N, V]: logits / temperature. [N, V] is large: a division by 1 and its backward take most of the softmax's time."""
    logits = F.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits / temperature
