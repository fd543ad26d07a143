"""Adapters in place: what is frozen, what merging gives, what peft loads."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conveyor.config import UserError, sections
from conveyor.config.sections import Lora
from conveyor.models.adapter_files import write_adapter
from conveyor.models.adapters import adapters_off, add_adapter, is_adapted, merged
from conveyor.models.language_model import load_language_model
from conveyor.models.quantized import is_quantized, quantized_names, round_weights, values
from conveyor.models.scalar_model import load_scalar_model
from tests.tiny import save_tiny_policy

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


def adapted(path: Path, lora: Lora, scalar: bool = False):
    """A model with an adapter whose B is not 0 any more."""
    load = load_scalar_model if scalar else load_language_model
    model = load(sections.Model(path=str(path)), lora=lora)
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
    assert is_adapted(weights) and not is_adapted(dict(merged(model, weights.items())))

    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    for name, weight in weights.items():
        if ".base_layer." in name:
            assert torch.equal(weight, before[name.replace(".base_layer.", ".")]), "frozen to the last bit"
    missing, unexpected = plain.load_state_dict(dict(merged(model, weights.items())), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    torch.testing.assert_close(plain(IDS).logits, wanted, atol=1e-5, rtol=1e-5)

    write_adapter(lora, weights.items(), str(base), tmp_path / "adapter")
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
    write_adapter(lora, weights_of(model).items(), str(tiny_reward_model), tmp_path / "adapter")
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


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 6.0 / 4), (True, 6.0 / 2)])
def test_the_scaling_by_hand(tiny_policy: Path, rslora: bool, scaling: float) -> None:
    """alpha/r, or alpha/√r."""
    model = adapted(tiny_policy, Lora(rank=4, alpha=6.0, use_rslora=rslora))
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    low, high = (getattr(layer, f"lora_{side}").default.weight for side in "AB")
    torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + scaling * high @ low).T, atol=1e-6, rtol=1e-6)


def test_dora_by_hand(tiny_policy: Path) -> None:
    """Rows of W + s·BA, brought to the lengths m; at first m are W's own, and nothing changes."""
    base = load_language_model(sections.Model(path=str(tiny_policy)))
    wanted = base(IDS).logits
    add_adapter(base, Lora(rank=4, use_dora=True))
    torch.testing.assert_close(base(IDS).logits, wanted, atol=1e-6, rtol=1e-6)
    layer = base.model.layers[1].self_attn.o_proj
    with torch.no_grad():
        layer.lora_B.default.weight.normal_(0, 0.1)
        layer.lora_magnitude_vector.default.weight.mul_(torch.linspace(0.5, 2, 64))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = layer.base_layer.weight + 32.0 / 4 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    rows = [length * row / row.pow(2).sum().sqrt() for length, row in zip(layer.lora_magnitude_vector.default.weight, weight, strict=True)]
    torch.testing.assert_close(layer(x), x @ torch.stack(rows).T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", [{"use_rslora": True}, {"use_dora": True}, {"quantization": "nf4"}, {"quantization": "nf4", "use_dora": True}], ids=str
)
def test_merged_and_saved_every_kind_computes_the_same(tiny_policy: Path, tmp_path: Path, kind: dict) -> None:
    lora = Lora(rank=4, alpha=6.0, **kind)
    model = adapted(tiny_policy, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.3)
    wanted = model(IDS).logits
    named = [(name, values(parameter)) for name, parameter in model.named_parameters()]
    plain = AutoModelForCausalLM.from_pretrained(tiny_policy)
    plain.load_state_dict(dict(merged(model, named)))
    torch.testing.assert_close(plain(IDS).logits, wanted, atol=1e-5, rtol=1e-5)
    write_adapter(lora, named, str(tiny_policy), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load_language_model(sections.Model(path=str(tiny_policy)), lora), tmp_path / "adapter")
    torch.testing.assert_close(loaded(IDS).logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"quantization": "nf4"}], ids=str)
def test_with_adapters_off_the_model_is_its_base_to_the_last_bit(tiny_policy: Path, kind: dict) -> None:
    lora = Lora(rank=4, **kind)
    model, base = adapted(tiny_policy, lora), load_language_model(sections.Model(path=str(tiny_policy)), lora)
    on, flags = model(IDS).logits, [parameter.requires_grad for parameter in model.parameters()]
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base(IDS).logits) and not torch.equal(on, base(IDS).logits)
    assert torch.equal(model(IDS).logits, on) and [parameter.requires_grad for parameter in model.parameters()] == flags
    model.requires_grad_(False)
    with adapters_off(model):
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters()), "what was frozen stays frozen"


def test_the_adapter_starts_alike_whatever_was_drawn_before(tiny_policy: Path) -> None:
    first, second, other = (load_language_model(sections.Model(path=str(tiny_policy))) for _ in range(3))
    state = torch.get_rng_state()
    add_adapter(first, Lora(rank=4), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    add_adapter(second, Lora(rank=4), seed=3)
    add_adapter(other, Lora(rank=4), seed=4)
    of_first, of_second, of_other = map(weights_of, (first, second, other))
    assert all(torch.equal(weight, of_second[name]) for name, weight in of_first.items())
    assert not any(torch.equal(weight, of_other[name]) for name, weight in of_first.items() if "lora_A" in name)


def test_4_bits_are_the_code_s_values_times_each_block_s_maximum(tiny_policy: Path) -> None:
    """NF4 (Dettmers et al. 2023, appendix E): 16 values in [−1, 1]; blocks of 64 weights. What any part rounds itself is the same."""
    code = torch.tensor([
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.3379152,
        0.4407098, 0.5626170, 0.7229568, 1.0,
    ])  # fmt: skip
    whole = load_language_model(sections.Model(path=str(tiny_policy)))
    model = load_language_model(sections.Model(path=str(tiny_policy)), Lora(quantization="nf4"))
    blocks = whole.model.layers[0].self_attn.q_proj.weight.detach().reshape(-1, 64)
    maximum = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / maximum)[..., None].sub(code).abs().argmin(-1)
    found = values(model.model.layers[0].self_attn.q_proj.weight)
    torch.testing.assert_close(found.reshape(-1, 64), code[nearest] * maximum, atol=1e-6, rtol=1e-5)
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight) and torch.equal(model.model.norm.weight, whole.model.norm.weight)
    names = quantized_names(whole.config)
    assert names == {name for name, parameter in model.named_parameters() if is_quantized(parameter)} and len(names) == 14
    round_weights(whole)
    assert all(torch.equal(weight, values(model.get_parameter(name))) for name, weight in whole.named_parameters())
