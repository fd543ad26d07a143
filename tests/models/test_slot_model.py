"""Sequences that share passes, against the model's own forward pass of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor.config import UserError
from conveyor.models.slot_model import FILL_TOKENS, SlotModel
from tests.tiny import tiny_config

BASE: dict[str, Any] = dict(
    vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "a window": lambda: transformers.MistralConfig(**BASE, sliding_window=8),
    "a window in some layers": lambda: transformers.Qwen2Config(**BASE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "a window that is off": lambda: transformers.Qwen2Config(**BASE, use_sliding_window=False, sliding_window=8),
    "capped logits": lambda: transformers.Gemma2Config(**BASE, head_dim=16, sliding_window=8),
    "learnt places": lambda: transformers.GPT2Config(vocab_size=264, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=2),
    "experts": lambda: transformers.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


def made(config: Any, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.08)
    return model


def sequence(length: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def alone(model: PreTrainedModel, *sequences: list[int]) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in sequences])


def decode(slots: SlotModel, sequences: list[list[int]]) -> torch.Tensor:
    return slots.decode([ids[-1] for ids in sequences], [len(ids) - 1 for ids in sequences])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_each_sequence_alone(kind: str, attention: str) -> None:
    model = made(CONFIGS[kind](), attention)
    sequences = [sequence(length, length) for length in (3, 40, 70)]
    sequences.append([*sequences[2][:12], 9])
    right = alone(model, *sequences)
    slots = SlotModel(model, kind)
    slots.fill([ids[:-2] for ids in sequences[:3]], range(3))
    slots.copy(2, [3], 11)
    decode(slots, [ids[:-1] for ids in sequences])
    torch.testing.assert_close(decode(slots, sequences), right, atol=1e-5, rtol=0)


def test_the_same_bits_in_any_company() -> None:
    """Alone, and among rows of other lengths, in other slots, filled in several passes, in a cache that has grown."""
    torch.set_num_threads(1)
    slots = SlotModel(made(tiny_config()), "tiny")
    sequences = [sequence(length, length) for length in (150, 5, 33, 64, 65, 1, 200, 34, 150, 97)]
    single = []
    for ids in sequences:
        slots.fill([ids[:-1]] if len(ids) > 1 else [], [0])
        single.append(decode(slots, [ids])[0])
        slots.clear()
    slots.fill([ids[:-1] for ids in sequences[4::-1]], [4, 3, 2, 1, 0])
    assert torch.equal(decode(slots, sequences[:5]), torch.stack(single[:5]))
    long = [slot for slot, ids in enumerate(sequences) if slot > 4 and len(ids) > 1]
    slots.fill([sequences[slot][:-1] for slot in long], long)
    assert torch.equal(decode(slots, sequences), torch.stack(single))
    many = [sequence(130, 7)] * (FILL_TOKENS // 160 + 3)
    slots.clear()
    slots.fill([ids[:-1] for ids in many], range(len(many)))
    together = decode(slots, many)
    assert torch.equal(together, together[:1].expand_as(together))


def test_nothing_of_earlier_weights_is_left() -> None:
    """A mask does not keep out a NaN."""
    model, ids = made(tiny_config()), sequence(20)
    slots = SlotModel(model, "tiny")
    right, norm = alone(model, ids), model.get_submodule("model.layers.0.input_layernorm").get_parameter("weight")
    with torch.no_grad():
        norm.fill_(torch.nan)
        slots.fill([sequence(60, 1)], [0])
        norm.fill_(1.0)
    slots.clear()
    slots.fill([ids[:-1]], [0])
    torch.testing.assert_close(decode(slots, [ids]), right, atol=1e-5, rtol=0)


def test_models_that_remember_otherwise_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.engine: transformers serves no model with linear_attention layers, as jamba has"):
        SlotModel(made(transformers.JambaConfig(**BASE)), "jamba")
    bloom = transformers.BloomConfig(vocab_size=264, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(UserError, match=r"rollout.engine: transformers cannot continue bloom in batches"):
        SlotModel(made(bloom, "eager"), "bloom")


def test_a_model_with_places_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores the places it is given would be wrong without a word."""
    model = made(transformers.LlamaConfig(**BASE))
    forward = type(model).forward

    def ignorant(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", ignorant)
    with pytest.raises(UserError, match=r"rollout.engine: transformers continues llama wrongly in batches"):
        SlotModel(model, "llama")
