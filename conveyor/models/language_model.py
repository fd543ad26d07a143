"""Causal language models, and the log-probabilities of the responses they are given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor.errors import UserError
from conveyor.models.attention import PACKED, attention_arguments, can_pack, packs
from conveyor.models.float32_head import float32_logits
from conveyor.models.liger import apply_liger
from conveyor.models.quantized import quantizing
from conveyor.models.rope import rope_parameters
from conveyor.models.routing import routing_of
from conveyor.models.sequence_parallel import parallel_of
from conveyor.types import Tokens

if TYPE_CHECKING:
    from conveyor.config import sections

CHUNK_LOGITS = 2**26
"""Logits held at a time, in fp32 256 MiB."""


class TokenHead(nn.Linear):
    """A language model's output layer that can also give log-probabilities of chosen tokens, without
    ever holding the logits of all of them.

    It is one module, called once, whatever the number of tokens: under ZeRO-3 a call gathers the weight,
    so ranks with different numbers of chunks would wait for each other forever.
    """

    float32 = False
    """Logits are float32 products, whatever the weight's type."""
    scale: float = 1.0
    cap: float | None = None
    """What the model does to the logits that this layer gives: c·tanh(scale · logit / c), without c only the scale."""

    @classmethod
    def over(cls, linear: nn.Linear, config: PretrainedConfig, float32: bool = False) -> TokenHead:
        """The same layer, with the same parameters, of a model of this config."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        if linear.bias is not None:
            head.bias = linear.bias
        head.float32 = float32
        # Cohere multiplies, Granite divides, Gemma caps.
        head.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        head.cap = getattr(config, "final_logit_softcapping", None)
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
            return float32_logits(hidden, self.weight, self.bias) if self.float32 else super().forward(hidden)
        chunk = chunk or max(1, CHUNK_LOGITS // self.out_features)
        scored = partial(_logprobs_entropy, entropy_grad=entropy_grad) if entropy else _logprobs
        scored = partial(scored, float32=self.float32, temperature=temperature, scale=self.scale, cap=self.cap)
        if len(ids) <= chunk:
            return scored(hidden, ids, self.weight, self.bias)
        parts = [
            checkpoint(scored, *part, self.weight, self.bias, use_reentrant=False)
            for part in zip(hidden.split(chunk), ids.split(chunk), strict=True)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def load_language_model(model: sections.Model, lora: sections.Lora | None = None) -> PreTrainedModel:
    """A causal language model, on CPU, in float32 or bfloat16, without dropout.

    Args:
        lora: the model is to be the base of such an adapter, in 4 bits where that says so.

    Raises:
        UserError: the folder or hub id holds no causal language model.
    """
    loaded, info = load_pretrained(AutoModelForCausalLM, model, lora)
    if info["missing_keys"]:
        raise UserError(f"model.path: {model.path}: not a causal language model: it has no {sorted(info['missing_keys'])[0]}")
    head = loaded.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"model.path: {model.path}: its output layer is {type(head).__name__}, only linear ones are supported")
    loaded.set_output_embeddings(TokenHead.over(head, loaded.config.get_text_config(), model.fp32_head))
    return loaded


def load_pretrained(
    auto_class: Any, model: sections.Model, lora: sections.Lora | None = None, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`auto_class.from_pretrained` with a recipe's settings → (model, transformers' loading info).

    Dropout and routers' noise are off: log-probs of the same weights are to be the same wherever they are computed.
    """
    from transformers.utils import logging

    if (rope := rope_parameters(model)) is not None:
        settings["rope_parameters"] = rope
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    if lora is not None and lora.quantization is not None:
        settings |= quantizing(getattr(torch, model.dtype))
    logging.set_verbosity_error()
    try:
        loaded, info = auto_class.from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), attn_implementation=model.attention, output_loading_info=True, **settings
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model.path: {model.path}: cannot be loaded as a model: {str(error).strip().splitlines()[0]}") from error
    finally:
        logging.set_verbosity(verbosity)
    if model.attention == "sdpa" and model.remove_padding and can_pack(type(loaded), loaded.config):
        loaded.set_attn_implementation(PACKED)
    _remove_noise(loaded)
    apply_liger(loaded, model.liger)
    loaded.eval()
    if model.gradient_checkpointing:
        loaded.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.train()  # transformers recomputes activations in training mode only
    return loaded, info


def _remove_noise(model: PreTrainedModel) -> None:
    """Dropout, and the noise that routers of experts see in training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def read_states(
    model: PreTrainedModel, tokens: Tokens, places: Tensor, read: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What `read` finds in the hidden states that the output layer reads; one pass of the backbone.

    Args:
        places: int64 [N], of `Tokens`: whose states are read.
        read: of states [n, H] and their numbers [n] in `places`, some columns [n].

    Returns:
        The columns, [N] each.
    """
    parallel = parallel_of(model)
    shard, first = (tokens, 0) if parallel is None else parallel.cut(tokens)
    of_row = attention_arguments(model, shard.lengths.tolist(), places.device, parallel) if tokens.packed and packs(model) else {}
    routing = routing_of(model)
    with nullcontext() if routing is None else routing.watched(tokens, first, shard.input_ids.numel(), parallel):
        outputs = model.base_model(input_ids=shard.input_ids, position_ids=shard.position_ids, use_cache=False, **of_row)
    hidden = outputs.last_hidden_state.flatten(0, 1)
    if parallel is None:
        return read(hidden[places], torch.arange(len(places), device=places.device))
    here = ((places >= first) & (places < first + len(hidden))).nonzero()[:, 0]
    return tuple(parallel.gather(column, here, len(places)) for column in read(hidden[places[here] - first], here))


def response_logprobs(
    model: PreTrainedModel,
    tokens: Tokens,
    prompt_lengths: Tensor,
    response_mask: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every response token under softmax(logits / temperature), and that distribution's entropy in nats.

    Only states before response tokens meet the output layer, `chunk` tokens at a time, and their logits are
    computed again in the backward pass: memory grows neither with prompt_length × V nor with tokens × V.

    Args:
        prompt_lengths: int64 [B].
        response_mask: bool [B, S].
        entropy_grad: the entropy is to have a gradient.

    Returns:
        float32 [B, S] twice, 0 where masked.
    """
    places = response_places(tokens, prompt_lengths, response_mask)
    ids = tokens.input_ids.flatten()[places]
    head = token_head(model)
    logprobs, entropy = read_states(
        model, tokens, places - 1, lambda hidden, which: head(hidden, ids[which], temperature, entropy_grad, chunk)
    )  # fmt: skip
    return spread(logprobs, response_mask), spread(entropy, response_mask)


def response_places(tokens: Tokens, prompt_lengths: Tensor, response_mask: Tensor) -> Tensor:
    """int64 [N]: places of the tokens at the N True places of the mask [B, S], sample by sample."""
    rows, columns = response_mask.nonzero(as_tuple=True)
    return tokens.starts[rows] + prompt_lengths[rows] + columns


def target_logprobs(model: PreTrainedModel, tokens: Tokens, places: Tensor) -> Tensor:
    """float32 [N]: log-probabilities of the tokens at places [N]. Only the states before them meet the output layer."""
    ids, head = tokens.input_ids.flatten()[places], token_head(model)
    (logprobs,) = read_states(model, tokens, places - 1, lambda hidden, which: head(hidden, ids[which], entropy=False))
    return logprobs


def token_head(model: PreTrainedModel) -> TokenHead:
    head: Any = model.get_output_embeddings()
    return head if isinstance(head, TokenHead) else TokenHead.over(head, model.config.get_text_config())


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """[N] → [B, S]: the values at the N True places of the mask, row by row; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _logprobs(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> tuple[Tensor]:
    """hidden [N, H], ids [N], weight [V, H] → log-probs [N]; settings are those of `_scores`."""
    return (-F.cross_entropy(_scores(hidden, weight, bias, **settings), ids, reduction="none"),)


def _logprobs_entropy(
    hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, entropy_grad: bool, **settings: Any
) -> tuple[Tensor, Tensor]:
    """hidden [N, H], ids [N], weight [V, H] → log-probs [N], entropies [N]; settings are those of `_scores`."""
    logprobs = torch.log_softmax(_scores(hidden, weight, bias, **settings), dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def _scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, float32: bool, scale: float, cap: float | None
) -> Tensor:
    """float32 [N, V]: logits / temperature. [N, V] is large: a division by 1 and its backward take most of the softmax's time."""
    logits = float32_logits(hidden, weight, bias) if float32 else F.linear(hidden, weight, bias).float()
    if cap is not None:
        return torch.tanh(logits * (scale / cap)) * (cap / temperature)
    return logits if scale == temperature else logits * (scale / temperature)
