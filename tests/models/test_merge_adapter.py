"""`conveyor merge-adapter`: a whole model, or one line that says why not."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conveyor.cli import main
from conveyor.config import sections
from conveyor.models.adapter_files import write_adapter
from conveyor.models.quantized import values
from tests.models.test_adapters import IDS, adapted
from tests.tiny import save_tiny_policy

Lora = sections.Lora


def logits(path: Path, kind=AutoModelForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return kind.from_pretrained(path)(IDS).logits


def write(model, lora: Lora, base: Path, folder: Path) -> Path:
    write_adapter(lora, [(name, values(parameter)) for name, parameter in model.named_parameters()], str(base), folder)
    return folder


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_a_run_s_adapter_becomes_a_model(tiny_policy: Path, tmp_path: Path, kind: dict) -> None:
    lora = Lora(rank=4, alpha=6.0, **kind)
    model = adapted(tiny_policy, lora)
    write(model, lora, tiny_policy, tmp_path / "run" / "adapter")
    assert main(["merge-adapter", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    torch.testing.assert_close(logits(tmp_path / "out"), model(IDS).logits.detach(), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_4_bits_merge_into_the_base_as_it_is_or_as_it_was_trained(tiny_policy: Path, tmp_path: Path) -> None:
    lora = Lora(rank=4, alpha=6.0, quantization="nf4")
    model = adapted(tiny_policy, lora)
    folder, outputs = write(model, lora, tiny_policy, tmp_path / "adapter"), (tmp_path / "whole", tmp_path / "rounded")
    assert main(["merge-adapter", str(folder), "--output", str(outputs[0])]) == 0
    assert main(["merge-adapter", str(folder), "--nf4", "--output", str(outputs[1])]) == 0
    torch.testing.assert_close(logits(outputs[1]), model(IDS).logits.detach(), atol=1e-5, rtol=1e-5)
    whole, rounded = (dict(AutoModelForCausalLM.from_pretrained(output).named_parameters()) for output in outputs)
    base = dict(AutoModelForCausalLM.from_pretrained(tiny_policy).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    product = rounded[name] - values(model.get_parameter(name.replace(".weight", ".base_layer.weight")))
    torch.testing.assert_close(whole[name] - base[name], product, atol=1e-6, rtol=1e-5)
    assert not torch.equal(whole[name], rounded[name])


def test_a_scalar_adapter_brings_its_head(tiny_reward_model: Path, tmp_path: Path) -> None:
    lora = Lora(rank=4)
    model = adapted(tiny_reward_model, lora, scalar=True)
    with torch.no_grad():
        model.score.weight += 0.5
    folder = write(model, lora, tiny_reward_model, tmp_path / "adapter")
    assert main(["merge-adapter", str(folder), "--output", str(tmp_path / "out")]) == 0
    merged = logits(tmp_path / "out", AutoModelForSequenceClassification)
    torch.testing.assert_close(merged, model(IDS).logits.detach(), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_another_program_and_a_base_that_is_named(tiny_policy: Path, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(tmp_path / "adapter")
    assert main(["merge-adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "out"), "--base", str(tiny_policy)]) == 0
    torch.testing.assert_close(logits(tmp_path / "out"), model(IDS).logits.detach(), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_merged_is_one_line_and_leaves_nothing(tiny_policy: Path, tmp_path: Path, capsys) -> None:
    lora = Lora(rank=4)
    folder = write(adapted(tiny_policy, lora), lora, tiny_policy, tmp_path / "adapter")
    wide = save_tiny_policy(tmp_path / "wide", hidden_size=96)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep me")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"")
    out = str(tmp_path / "out")
    cases = [
        ([str(tiny_policy), "--output", out], f"{tiny_policy}: neither an adapter (adapter_config.json, adapter_model.safetensors) nor"),
        ([str(folder), "--output", out, "--base", str(tmp_path / "none")], "--base: "),
        ([str(folder), "--output", out, "--base", str(wide)], f"{folder}: does not fit {wide}: "),
        ([str(folder), "--output", str(tmp_path / "full")], f"--output: {tmp_path / 'full'} already holds something"),
        ([str(tmp_path / "broken"), "--output", out], "adapter_config.json: not a peft configuration"),
        ([str(folder), "--output", out, "--model", "x"], "--model: unknown argument"),
    ]
    for arguments, line in cases:
        assert main(["merge-adapter", *arguments]) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes.txt"]
