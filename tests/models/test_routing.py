"""Mixtures of experts in the passes that training makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, OlmoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from conveyor.algorithms.metrics import Mean
from conveyor.config import UserError, sections
from conveyor.data.packing import lay_out
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.routing import (
    Gating,
    Routing,
    check_routers,
    expert_blocks,
    find_routers,
    gating_of,
    place_experts,
    routing_of,
    token_owners,
    watch,
)
from conveyor.models.zero import gather_whole
from tests.tiny import save_tiny_moe, tiny_config, tiny_moe_config

KINDS = ["qwen3_moe", "mixtral"]
SAMPLES = [[1, 50, 51, 52, 53, 54, 55], [1, 60, 61], [1, 70, 71, 72, 73]]
PROMPTS = torch.tensor([2, 1, 3])
MASK = torch.tensor([[True] * 5, [True, True, False, False, False], [True, True, False, False, False]])
ON = sections.Train(router_aux_loss_coef=0.1)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("models") / request.param, request.param)


def loaded(folder: Path, train: sections.Train | None = ON, replays: bool = False, **settings: Any) -> tuple[Any, Routing]:
    model = load_language_model(sections.Model(path=str(folder), **settings))
    watch(model, train, replays)
    routing = routing_of(model)
    assert routing is not None
    return model, routing


def logprobs(model: Any, packed: bool = True, experts: list[Tensor | None] | None = None) -> Tensor:
    """[N] of the response tokens."""
    tokens = lay_out(SAMPLES, packed)
    if experts is not None:
        tokens = replace(tokens, experts=place_experts(tokens, experts))
    return response_logprobs(model, tokens, PROMPTS, MASK, 1.0)[0][MASK]


def alone(model: Any) -> list[tuple[Tensor, ...]]:
    """Router logits of each sample by itself, as transformers records them: layers of [T, E]."""
    with torch.no_grad():
        return [model(torch.tensor([sample]), output_router_logits=True).router_logits for sample in SAMPLES]


def test_routers_and_their_gates_are_known(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert [layer for layer, _ in find_routers(model)] == [0, 1]
    assert [type(block).__name__[-14:] for block in expert_blocks(model)] == ["SparseMoeBlock"] * 2
    assert gating_of(type(find_routers(model)[0][1]), model.config) == Gating(softmax=True, renormalized=True, scale=1.0)


def test_other_gates_are_found_by_asking() -> None:
    assert gating_of(OlmoeTopKRouter, OlmoeConfig(hidden_size=32)) == Gating(softmax=True, renormalized=False, scale=1.0)
    sigmoid = gating_of(DeepseekV3TopkRouter, DeepseekV3Config(hidden_size=32))
    assert sigmoid == Gating(softmax=False, renormalized=True, scale=2.5)
    assert sigmoid.probabilities(torch.tensor([[0.0, 0.0], [-50.0, 50.0]])).flatten().tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0])

    class Strange(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8))

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden @ self.weight.T
            values, experts = logits.topk(2)
            return logits, values.exp(), experts

    assert gating_of(Strange, tiny_config()) is None


@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_is_that_of_each_sample_by_itself(folder: Path, packed: bool) -> None:
    """Σ w · E/(K·T²) Σ_e n_e Σ_t p_te, the mean over layers, from logits of samples that were computed alone."""
    model, routing = loaded(folder, remove_padding=packed)
    weights, wanted = torch.tensor([5.0, 2.0, 0.0]), 0.0
    for weight, layers in zip(weights.tolist(), alone(model), strict=True):
        of_layers = []
        for logits in layers:
            probabilities, (tokens, experts) = logits.softmax(-1), logits.shape
            counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=experts)
            of_layers.append(float((counts * probabilities.sum(0)).sum()) * experts / (2 * tokens**2))
        wanted += weight * sum(of_layers) / len(of_layers)
    logprobs(model, packed)
    loss, metrics = routing.balance(weights)
    assert loss is not None
    assert loss.item() == pytest.approx(0.1 * wanted, rel=1e-5)
    found = metrics["moe/aux_loss"]
    assert isinstance(found, Mean) and found.value == pytest.approx(wanted / 7, rel=1e-5)


def test_micro_batch_counts_as_transformers_does(folder: Path) -> None:
    model, routing = loaded(folder, sections.Train(router_aux_loss_coef=0.5, router_aux_loss="micro_batch"))
    pooled = tuple(torch.cat(layer) for layer in zip(*alone(model), strict=True))
    logprobs(model)
    loss, _ = routing.balance(torch.tensor([1.0, 1.0, 2.0]))
    assert loss is not None
    assert loss.item() == pytest.approx(0.5 * 4 * float(load_balancing_loss_func(pooled, pooled[0].shape[1], 2)), rel=1e-5)


def test_the_load_counts_every_real_token(folder: Path) -> None:
    model, routing = loaded(folder, sections.Train(), remove_padding=False)
    layers = [torch.cat(layer) for layer in zip(*alone(model), strict=True)]
    shares = [torch.bincount(logits.topk(2).indices.flatten(), minlength=logits.shape[1]) * logits.shape[1] / 30 for logits in layers]
    logprobs(model, packed=False)
    loss, metrics = routing.balance(torch.ones(3))
    assert loss is None, "off without a coefficient"
    assert metrics.keys() == {"moe/expert_load_max", "moe/expert_load_min"}
    assert metrics["moe/expert_load_max"].value == pytest.approx(max(float(share.max()) for share in shares))
    assert metrics["moe/expert_load_min"].value == pytest.approx(min(float(share.min()) for share in shares))


def test_recomputed_activations_give_the_same_gradient(folder: Path) -> None:
    """Also where experts are replayed: the recomputation sends tokens to the same ones."""
    gradients = []
    for recomputes in (False, True):
        model, routing = loaded(folder, replays=True, gradient_checkpointing=recomputes)
        experts = [torch.randint(4, (len(sample) - 1, 2, 1), generator=torch.Generator().manual_seed(9)) for sample in SAMPLES]
        given = [torch.cat((first, (first + 1) % 4), 2) for first in experts]
        values = logprobs(model, experts=given)
        loss, _ = routing.balance(torch.tensor([1.0, 2.0, 3.0]))
        assert loss is not None
        (values.sum() + 10 * loss).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
    router = gradients[0][next(name for name in gradients[0] if name.endswith("gate.weight"))]
    assert router is not None and router.abs().max() > 1e-4


def test_a_routers_own_experts_replayed_change_nothing(folder: Path) -> None:
    model, _ = loaded(folder, replays=True)
    own = [torch.stack([logits.topk(2).indices for logits in layers], 1)[:-1] for layers in alone(model)]
    free, replayed = logprobs(model), logprobs(model, experts=own)  # type: ignore[arg-type]
    assert torch.equal(free, replayed)
    some = logprobs(model, experts=[own[0], None, own[2][:2]])
    assert torch.equal(free, some)


def test_replayed_experts_are_those_that_compute(folder: Path) -> None:
    """The same as a router whose choice is dictated, its weights being its own, renormalised over the chosen."""
    model, _ = loaded(folder, replays=True)
    generator = torch.Generator().manual_seed(4)
    given = [torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(2 * len(sample))]).view(-1, 2, 2) for sample in SAMPLES]
    replayed = logprobs(model, experts=[experts[:-1] for experts in given])
    assert (replayed - logprobs(model)).abs().max() > 1e-3, "other experts than its own"

    plain = AutoModelForCausalLM.from_pretrained(folder)
    wanted, chosen = [], given[0]

    def dictated(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            experts = chosen[:, layer].clone()
            experts[-1] = output[2][-1]  # the engine never computed the last token
            weights = output[0].softmax(-1).gather(1, experts)
            return output[0], weights / weights.sum(1, keepdim=True), experts

        return hook

    for layer, router in find_routers(plain):
        router.register_forward_hook(dictated(layer))
    for sample, chosen, prompt in zip(SAMPLES, given, PROMPTS.tolist(), strict=True):  # noqa: B007 (the hooks read `chosen`)
        with torch.no_grad():
            logits = plain(torch.tensor([sample])).logits[0, prompt - 1 : -1]
        wanted.append(logits.log_softmax(-1).gather(1, torch.tensor(sample[prompt:])[:, None])[:, 0][: int(MASK[len(wanted)].sum())])
    torch.testing.assert_close(replayed, torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_blocks_of_any_class_are_gathered_whole() -> None:
    """DeepSpeed knows some models' blocks by itself."""

    class Block(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Block(2, 2), nn.Linear(2, 2))
    gather_whole([model[1]])
    assert [z3_leaf_module(module) for module in model] == [False, True, False]


def test_owners_are_those_of_the_places() -> None:
    assert token_owners(lay_out([[1, 2], [3], [4, 5, 6]], True)).tolist() == [0, 0, 1, 2, 2, 2]
    assert token_owners(lay_out([[1, 2], [3], [4, 5, 6]], False)).tolist() == [0, 0, -1, 1, -1, -1, 2, 2, 2]


def test_routers_make_no_noise(tmp_path: Path) -> None:
    save_tiny_moe(tmp_path, "mixtral", router_jitter_noise=0.3)
    model = load_language_model(sections.Model(path=str(tmp_path), gradient_checkpointing=True))
    assert model.training
    assert torch.equal(logprobs(model), logprobs(model))


def test_a_model_without_routers_is_left_alone_or_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config())
    watch(model, sections.Train())
    assert routing_of(model) is None
    with pytest.raises(UserError, match=r"train.router_aux_loss_coef: a llama model has no routers of experts"):
        check_routers(tiny_config(), ON)
    with pytest.raises(UserError, match=r"rollout.routing_replay: a llama model has no routers of experts"):
        check_routers(tiny_config(), sections.Train(), replays=True)
    for kind in KINDS:
        check_routers(tiny_moe_config(kind), ON, replays=True)
