"""Samples in one row see themselves only, whatever the model: hidden states and gradients are those of each sample alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conveyor.config import UserError
from conveyor.config.sections import Model
from conveyor.data.packing import lay_out
from conveyor.models.attention import FULLEST, PACKED, Sequences, can_pack, packs
from conveyor.models.language_model import load_language_model, read_states, response_logprobs
from conveyor.models.sequence_parallel import parallelize
from conveyor.types import Tokens
from tests.tiny import save_tiny_policy

SHAPE: dict[str, Any] = dict(
    vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OLD_SHAPE: dict[str, Any] = {name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
PACKING: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "qwen2": SHAPE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": SHAPE,
    "mistral": SHAPE | {"sliding_window": 8},
    "mixtral": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": SHAPE | {"sliding_window": 8},
    "phi3": SHAPE,
    "olmo2": SHAPE,
    "gpt_neox": OLD_SHAPE,
    "gpt2": {"vocab_size": 264, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": SHAPE,
    "gpt_oss": SHAPE | {"num_local_experts": 4},
    "bloom": {"vocab_size": 264, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2},
}
"""Capped attention, sinks, biases by distance, no attention."""
LENGTHS = (9, 5, 17, 2, 12, 3, 30, 11, 1)


def made(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 264, (length,), generator=generator).tolist() for length in lengths]


def hidden(model: PreTrainedModel, tokens: Tokens) -> list[torch.Tensor]:
    """[T, H] of each sample."""
    everywhere = torch.arange(tokens.input_ids.numel())
    (states,) = read_states(model, tokens, everywhere, lambda found, _: (found,))
    return [states[start : start + length] for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("kind", [*PACKING, *OTHERS])
def test_states_are_those_of_each_sample_alone(kind: str) -> None:
    model = made(kind, (PACKING | OTHERS)[kind])
    assert can_pack(type(model), model.config) == (kind in PACKING)
    with torch.no_grad():
        alone = [model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in samples()]
        if kind in PACKING:
            model.set_attn_implementation(PACKED)
        for packed in (kind in PACKING, False):
            for found, wanted in zip(hidden(model, lay_out(samples(), packed)), alone, strict=True):
                torch.testing.assert_close(found, wanted, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_gradients_are_those_of_each_sample_alone(kind: str) -> None:
    model = made(kind, PACKING[kind]).double()

    def gradients(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        sum((row.sin().sum() for row in rows), torch.zeros((), dtype=torch.float64)).backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    wanted = gradients([model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in samples()])
    model.set_attn_implementation(PACKED)
    for packed in (True, False):
        for found, right in zip(gradients(hidden(model, lay_out(samples(), packed))), wanted, strict=True):
            torch.testing.assert_close(found, right, atol=5e-6, rtol=1e-5)  # Gemma normalises in float32


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_buckets_hold_every_token_once_and_little_padding(lengths: list[int]) -> None:
    sequences = Sequences(tuple(lengths), torch.device("cpu"))
    buckets, back = sequences.buckets
    assert torch.equal(torch.cat([bucket.flatten() for bucket in buckets])[back], torch.arange(sum(lengths)))
    assert len(set(back.tolist())) == sum(lengths)
    assert sum(len(bucket) for bucket in buckets) == len(lengths)
    assert sum(bucket.numel() for bucket in buckets) <= sum(lengths) / FULLEST
    assert sequences.cumulative.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]


def test_a_recipe_chooses_whether_samples_stand_in_one_row(tmp_path) -> None:
    path = str(save_tiny_policy(tmp_path))
    assert packs(load_language_model(Model(path=path)))
    assert not packs(load_language_model(Model(path=path, remove_padding=False)))
    assert not packs(load_language_model(Model(path=path, attention="eager")))


def test_attention_costs_what_the_samples_do_and_not_the_row(tmp_path) -> None:
    """No matrix of the row's tokens by the row's tokens is ever made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            outputs = function(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
                if isinstance(output, torch.Tensor):
                    self.numel = max(self.numel, output.numel())
            return outputs

    model = load_language_model(Model(path=str(save_tiny_policy(tmp_path))))
    tokens = lay_out(samples((30,) * 40), packed=True)
    with Largest() as largest:
        mask = torch.ones(40, 10, dtype=torch.bool)
        response_logprobs(model, tokens, torch.full((40,), 20), mask, 1.0)[0].sum().backward()
    assert largest.numel < 1200 * 1200 / 4


def test_rows_that_cannot_be_cut_over_ranks_are_refused(tmp_path) -> None:
    path = str(save_tiny_policy(tmp_path))
    with pytest.raises(UserError, match="sequence_parallel_size: 3 ranks cannot share 2 attention heads and 1 of keys"):
        parallelize(load_language_model(Model(path=path)), 3)
    with pytest.raises(UserError, match=r"sequence_parallel_size: needs model.attention sdpa"):
        parallelize(load_language_model(Model(path=path, attention="eager")), 2)
