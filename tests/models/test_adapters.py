"""Adapters in place: what is frozen, what merging gives, what peft loads."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conveyor.config import UserError, sections
from conveyor.config.offline import Lora
from conveyor.models.adapters import add_adapter, is_adapted, merged, write_adapter
from conveyor.models.language_model import load_language_model
from conveyor.models.scalar_model import load_scalar_model
from tests.tiny import save_tiny_policy

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


def adapted(path: Path, lora: Lora, scalar: bool = False):
    """A model with an adapter whose B is not 0 any more."""
    model = (load_scalar_model if scalar else load_language_model)(sections.Model(path=str(path)))
    add_adapter(model, lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_only_the_adapter_is_trained(tiny_policy: Path) -> None:
    model = load_language_model(sections.Model(path=str(tiny_policy)))
    before = model(IDS).logits
    add_adapter(model, Lora(rank=4))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(LINEAR) and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained), "the output layer is not adapted"
    assert torch.equal(model(IDS).logits, before), "B starts at 0"


def test_target_modules_choose_the_layers(tiny_policy: Path) -> None:
    model = adapted(tiny_policy, Lora(rank=4, target_modules=("q_proj", "v_proj")))
    assert {name.split(".")[-4] for name in weights_of(model) if ".lora_" in name} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(("unknown", "scalar"), [("w_proj", False), ("lm_head", False), ("score", True)])
def test_unknown_target_modules_are_one_line(tiny_policy: Path, tiny_reward_model: Path, unknown: str, scalar: bool) -> None:
    model = (load_scalar_model if scalar else load_language_model)(sections.Model(path=str(tiny_reward_model if scalar else tiny_policy)))
    with pytest.raises(UserError, match=f"lora.target_modules: no linear layer is named {unknown}; the model has down_proj, ") as caught:
        add_adapter(model, Lora(target_modules=("q_proj", unknown)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_is_the_adapted_model_and_so_is_what_peft_loads(tmp_path: Path, tied: bool) -> None:
    base = save_tiny_policy(tmp_path / "base", tie_word_embeddings=tied)
    lora = Lora(rank=4, alpha=10.0)
    model = adapted(base, lora)
    weights, wanted = weights_of(model), model(IDS).logits
    assert is_adapted(weights) and not is_adapted(merged(model, weights))

    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    for name, weight in weights.items():
        if ".base_layer." in name:
            assert torch.equal(weight, before[name.replace(".base_layer.", ".")]), "frozen to the last bit"
    missing, unexpected = plain.load_state_dict(merged(model, weights), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    torch.testing.assert_close(plain(IDS).logits, wanted, atol=1e-5, rtol=1e-5)

    write_adapter(model, lora, weights, str(base), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    torch.testing.assert_close(loaded(IDS).logits, wanted, atol=1e-5, rtol=1e-5)
    assert (loaded.peft_config["default"].r, loaded.peft_config["default"].base_model_name_or_path) == (4, str(base))
    assert not (loaded(IDS).logits - AutoModelForCausalLM.from_pretrained(base)(IDS).logits).abs().max() < 1e-3


def test_a_scalar_models_head_is_trained_whole_and_goes_into_the_adapter(tiny_reward_model: Path, tmp_path: Path) -> None:
    lora = Lora(rank=4)
    model = adapted(tiny_reward_model, lora, scalar=True)
    assert model.score.weight.requires_grad and not any("score.lora" in name for name in weights_of(model))
    with torch.no_grad():
        model.score.weight += 0.5
    write_adapter(model, lora, weights_of(model), str(tiny_reward_model), tmp_path / "adapter")
    plain = AutoModelForSequenceClassification.from_pretrained(tiny_reward_model)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_the_adapter_is_the_same_function_as_peft_s_own(tiny_policy: Path) -> None:
    """Same A and B through `get_peft_model`."""
    model = adapted(tiny_policy, Lora(rank=4, alpha=6.0))
    peft_s = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_policy), LoraConfig(r=4, lora_alpha=6, target_modules=list(LINEAR), lora_dropout=0.0)
    )
    theirs = dict(peft_s.named_parameters())
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            if ".lora_" in name:
                theirs[f"base_model.model.{name}"].copy_(weight)
    torch.testing.assert_close(model(IDS).logits, peft_s(IDS).logits, atol=1e-6, rtol=1e-6)
