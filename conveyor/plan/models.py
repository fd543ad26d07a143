"""Shapes of decoder-only transformers: parameters, arithmetic and cache from a model's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse layers of a mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated MLPs."""

    count: int
    per_token: int
    intermediate: int
    """Of one expert."""
    shared: int = 0
    """Intermediate size of the experts that every token goes to, together."""
    gated_shared: bool = False
    """The shared experts' output has a gate of its own, hidden × 1 (Qwen 2)."""
    dense_layers: int = 0
    """Layers that have an ordinary MLP instead."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention (Ainslie et al. 2023) and gated MLPs (Shazeer 2020), as Llama and Qwen have."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Of the MLP of a dense layer."""
    vocab: int
    tied: bool = False
    """One matrix is both embedding and output layer."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, with one weight of `head_size` each (Qwen 3)."""
    experts: Experts | None = None
    scalar: bool = False
    """One number comes out instead of logits: a reward model or a critic."""

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    @property
    def _attention(self) -> int:
        """Query and output: hidden × heads·size; key and value: hidden × kv_heads·size; two norms of the layer."""
        width = self.head_size * (self.heads + 2 * self.kv_heads)
        matrices = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return matrices + 2 * self.hidden + width * self.qkv_bias + 2 * self.head_size * self.qk_norm

    @property
    def dense_layer_parameters(self) -> int:
        return self._attention + 3 * self.hidden * self.intermediate

    def _sparse_layer_parameters(self, experts: int) -> int:
        """With so many of a layer's experts."""
        assert self.experts is not None
        mlps = experts * self.experts.intermediate + self.experts.shared
        return self._attention + 3 * self.hidden * mlps + self.hidden * (self.experts.count + self.experts.gated_shared)

    @property
    def layer_parameters(self) -> int:
        """Of the largest layer."""
        return self.dense_layer_parameters if self.experts is None else self._sparse_layer_parameters(self.experts.count)

    @property
    def _dense_layers(self) -> int:
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def all_layer_parameters(self) -> int:
        dense = self._dense_layers
        return dense * self.dense_layer_parameters + (self.layers - dense) * self.layer_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Of all layers, those that one token meets."""
        if self.experts is None:
            return self.all_layer_parameters
        sparse = self._sparse_layer_parameters(self.experts.per_token)
        return self._dense_layers * self.dense_layer_parameters + (self.layers - self._dense_layers) * sparse

    @property
    def outer_parameters(self) -> int:
        """Embedding, output layer (or score layer) and the last norm."""
        matrices = 1 if self.tied or self.scalar else 2
        return matrices * self.vocab * self.hidden + self.hidden + self.hidden * self.scalar

    @property
    def parameters(self) -> int:
        return self.all_layer_parameters + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """That one token meets, embeddings and output layer included, as the numbers in names such as A3B are counted."""
        return self.active_layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int, targets: Iterable[str] = ()) -> int:
        """Of low-rank factors (Hu et al. 2021) of linear layers: rank × (in + out) each. By default of all linear layers but the
        output layer; the experts of a sparse layer are no linear layers but stacked weights, and have none.
        """
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = {"q_proj": self.hidden + q, "k_proj": self.hidden + kv, "v_proj": self.hidden + kv, "o_proj": self.hidden + q}
        chosen = set(targets) or {*ATTENTION_LAYERS, *MLP_LAYERS}
        sides = self.layers * sum(size for name, size in attention.items() if name in chosen)
        mlps = self._dense_layers * self.intermediate + (self.layers - self._dense_layers) * (self.experts.shared if self.experts else 0)
        widths = self._dense_layers + (self.layers - self._dense_layers) * bool(self.experts and self.experts.shared)
        return rank * (sides + (mlps + widths * self.hidden) * len(chosen & set(MLP_LAYERS)))

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers inside the layers, which QLoRA keeps in 4 bits; stacked experts are none."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        sparse = self.layers - self._dense_layers
        shared = self.experts.shared if self.experts else 0
        return self.layers * attention + 3 * self.hidden * (self._dense_layers * self.intermediate + sparse * shared)

    def as_scalar(self) -> ModelShape:
        """The sequence classifier with one label that is made from this model."""
        return replace(self, scalar=True)

    # ── arithmetic ───────────────────────────────────────────────────────────────────────────────

    @property
    def token_flops(self) -> float:
        """Of one token's forward pass through the layers, without attention over the context and without the output layer: 2 a
        parameter that it meets (Kaplan et al. 2020, §2.1)."""
        return 2.0 * self.active_layer_parameters

    @property
    def head_flops(self) -> float:
        """Of the output layer, a token."""
        return 2.0 * self.vocab * self.hidden

    def attention_flops(self, length: int) -> float:
        """Causal attention over a whole sequence of `length` tokens, all layers: QKᵀ and AV are 2·T²·heads·size each, and
        half of both is masked (Dao 2023, §4.1)."""
        return 2.0 * self.layers * self.heads * self.head_size * length**2

    def read_parameters(self, tokens: float) -> float:
        """Layer weights that a pass over `tokens` tokens reads: of a sparse layer the experts that at least one of them goes to, if
        the router spreads them evenly: count · (1 − (1 − k/count)^tokens)."""
        if self.experts is None:
            return self.all_layer_parameters
        count, share = self.experts.count, self.experts.per_token / self.experts.count
        hit = count * (1 - (1 - share) ** tokens)
        per_expert = 3 * self.hidden * self.experts.intermediate * (self.layers - self._dense_layers)
        return self.all_layer_parameters - (count - hit) * per_expert

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def cache_bytes(self, bytes_per_number: int = 2) -> int:
        """Keys and values of one token in all layers. Llama-3-8B in bfloat16: 131,072."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_number

    @property
    def layer_activations(self) -> int:
        """Numbers that a layer keeps for its backward pass, a token, with attention that stores no matrix of scores (Dao 2023):
        twice the input of each norm and its output (norms compute in fp32, which counts double: 2 · (2 + 2 + 1)); queries, keys, values
        and the attention's output; of each MLP that the token meets gate, up, activated gate and product. Experts keep the token's
        input and output each besides."""
        attention = 10 * self.hidden + self.head_size * (2 * self.heads + 2 * self.kv_heads)
        if self.experts is None:
            return attention + 4 * self.intermediate
        met = self.experts.per_token * self.experts.intermediate + self.experts.shared
        return attention + 4 * met + 2 * self.experts.per_token * self.hidden


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """From the keys of a Hugging Face configuration. Raises KeyError where one is missing, ValueError for a kind that is not modelled."""
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        raise ValueError("kv_lora_rank: multi-head latent attention is not modelled")
    kind, heads, layers = str(config.get("model_type", "")), int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    return ModelShape(
        layers=layers,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("qkv_bias") or (kind == "qwen2")),
        qk_norm=kind.startswith("qwen3"),
        experts=_experts(config, layers),
    )


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    count = next((int(config[key]) for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    if count is None:
        return None
    every, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % every == 0]
    return Experts(
        count=count,
        per_token=int(config["num_experts_per_tok"]),
        intermediate=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        shared=int(config.get("shared_expert_intermediate_size") or 0),
        gated_shared=bool(config.get("shared_expert_intermediate_size")),
        dense_layers=layers - len(sparse),
    )
