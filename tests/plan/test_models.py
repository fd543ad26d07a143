"""Shapes of models against numbers that are published, and against the models that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from conveyor.config.sections import Lora
from conveyor.models.adapters import add_adapter
from conveyor.plan.known_models import NAMED, known_shape
from conveyor.plan.models import shape_from_config

SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=24, intermediate_size=96, vocab_size=300, num_hidden_layers=3
)
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL),
    MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    Qwen3MoeConfig(**SMALL, moe_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    Qwen3MoeConfig(**SMALL, moe_intermediate_size=40, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1]),
    Qwen2MoeConfig(
        **SMALL, moe_intermediate_size=40, num_experts=6, num_experts_per_tok=2, shared_expert_intermediate_size=56, decoder_sparse_step=2
    ),
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen2.5-0.5B", 494_032_768), ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512), ("Qwen/Qwen2.5-72B", 72_706_203_648),
     ("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-8B", 8_190_735_360), ("Qwen/Qwen3-32B", 32_762_123_264),
     ("Qwen/Qwen3-30B-A3B", 30_532_122_624), ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704),
     ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552), ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
     ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248), ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496)],
)  # fmt: skip
def test_hub_ids_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert shape.parameters == parameters


def test_what_is_not_known_is_not_guessed() -> None:
    assert known_shape("meta-llama/Llama-4-Scout-17B-16E") is None
    assert known_shape("somebody/Llama-3-8B") is None
    assert known_shape("runs/quickstart/base") is None


def test_a_mixture_of_experts_is_stored_whole_and_computed_in_part() -> None:
    """Qwen3-30B-A3B: "30.5B in total and 3.3B activated", as its card says; Mixtral 8x7B: 46.7B and 12.9B (Jiang et al. 2024)."""
    sparse = NAMED["30b-a3b"]
    assert sparse.parameters / 1e9 == pytest.approx(30.53, abs=0.005)
    assert sparse.active_parameters / 1e9 == pytest.approx(3.35, abs=0.01)
    assert sparse.token_flops == 2 * (sparse.active_parameters - sparse.outer_parameters)
    mixtral = known_shape("mistralai/Mixtral-8x7B-v0.1")
    assert mixtral is not None
    assert mixtral.active_parameters / 1e9 == pytest.approx(12.88, abs=0.01)


def test_a_pass_reads_the_experts_that_its_tokens_go_to() -> None:
    sparse = NAMED["30b-a3b"]
    assert sparse.read_parameters(1) == pytest.approx(sparse.active_layer_parameters)
    assert sparse.read_parameters(10_000) == pytest.approx(sparse.all_layer_parameters)
    assert NAMED["8b"].read_parameters(1) == NAMED["8b"].all_layer_parameters


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_are_those_of_the_model(config: PretrainedConfig) -> None:
    shape = shape_from_config(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        scalar = AutoModelForSequenceClassification.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.as_scalar().parameters == sum(parameter.numel() for parameter in scalar.parameters())


# In a model with dense and sparse layers peft gives the experts factors too where the dense layers' names are targets.
ALIKE = [config for config in CONFIGS if not getattr(config, "mlp_only_layers", None)]


@pytest.mark.parametrize("config", ALIKE, ids=lambda config: config.model_type)
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
def test_adapters_have_the_parameters_of_those_that_are_added(config: PretrainedConfig, targets: tuple[str, ...]) -> None:
    model: Any = AutoModelForCausalLM.from_config(config)
    linear = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2].endswith("_proj")
    )
    shape = shape_from_config(config.to_dict())
    assert shape.linear_parameters == linear
    add_adapter(model, Lora(rank=4, target_modules=targets or ("q_proj", "k_proj", "v_proj", "o_proj", *_mlp(model))))
    assert shape.adapter_parameters(4, targets) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def _mlp(model: Any) -> tuple[str, ...]:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return tuple(sorted(names & {"gate_proj", "up_proj", "down_proj"}))


def test_kinds_that_are_not_modelled_are_refused() -> None:
    with pytest.raises(ValueError, match="latent attention"):
        shape_from_config({"num_attention_heads": 8, "num_hidden_layers": 2, "kv_lora_rank": 512})
