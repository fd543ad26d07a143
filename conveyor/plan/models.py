"""Shapes of decoder-only transformers: parameters, arithmetic and cache from a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.config import UserError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention (Ainslie et al. 2023) and a gated MLP (Shazeer 2020), as Llama and Qwen have."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    tied: bool = False
    """One matrix is both embedding and output layer."""

    @property
    def layer_parameters(self) -> int:
        """Attention (query, output: hidden × heads·size; key, value: hidden × kv_heads·size), MLP (3 matrices) and 2 norms."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        matrices = 1 if self.tied else 2
        return self.layers * self.layer_parameters + matrices * self.vocab * self.hidden + self.hidden

    @property
    def token_flops(self) -> float:
        """Of one token's forward pass through the layers, without attention over the context and without the output layer: 2 a
        parameter (Kaplan et al. 2020, §2.1)."""
        return 2.0 * self.layers * self.layer_parameters

    @property
    def head_flops(self) -> float:
        """Of the output layer, a token."""
        return 2.0 * self.vocab * self.hidden

    def attention_flops(self, length: int) -> float:
        """Causal attention over a whole sequence of `length` tokens, all layers: QKᵀ and AV are 2·T²·heads·size each, and
        half of both is masked (Dao 2023, §4.1)."""
        return 2.0 * self.layers * self.heads * self.head_size * length**2

    def cache_bytes(self, bytes_per_number: int = 2) -> int:
        """Keys and values of one token in all layers. Llama-3-8B in bfloat16: 131,072."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_number


NAMED = {
    "1b": ModelShape(16, 2048, 32, 8, 64, 8192, 128_256, tied=True),  # Llama 3.2
    "3b": ModelShape(28, 3072, 24, 8, 128, 8192, 128_256, tied=True),  # Llama 3.2
    "7b": ModelShape(32, 4096, 32, 32, 128, 11_008, 32_000),  # Llama 2
    "8b": ModelShape(32, 4096, 32, 8, 128, 14_336, 128_256),  # Llama 3
    "13b": ModelShape(40, 5120, 40, 40, 128, 13_824, 32_000),  # Llama 2
    "32b": ModelShape(64, 5120, 40, 8, 128, 27_648, 152_064),  # Qwen 2.5
    "70b": ModelShape(80, 8192, 64, 8, 128, 28_672, 128_256),  # Llama 3
}


def model_shape(name: str, flag: str = "--model") -> ModelShape:
    """The shape of a named model, or of a folder that holds a Hugging Face config.json; `flag`: where it was named.

    Raises:
        UserError: neither, or a model of another kind.
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        raise UserError(f"{flag}: {name!r} is neither a folder with a config.json nor one of {', '.join(NAMED)}")
    try:
        return shape_from_config(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag}: {path}: no shape can be read from it ({error!r})") from None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """From the keys of a Hugging Face configuration. Raises KeyError where one is missing, ValueError for a mixture of experts."""
    config = config.get("text_config", config)
    experts = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    if experts:
        raise ValueError(f"{experts}: mixtures of experts are not modelled")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
