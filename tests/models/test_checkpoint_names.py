"""Weights in the form of a checkpoint, one parameter at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conveyor.models.checkpoint_names import CheckpointNames
from tests.tiny import save_tiny_moe, save_tiny_policy


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_they_are_what_save_pretrained_writes(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_moe(tmp_path / kind, kind)
    model, written = AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")
    found = list(CheckpointNames.of(str(folder)).convert((name, weight.detach()) for name, weight in model.named_parameters()))
    assert len(found) == len(written) > len(list(model.parameters())), "none twice, and experts have become single"
    for name, tensor in found:
        assert torch.equal(tensor, written[name]), name
    again = dict(CheckpointNames.of(str(folder)).convert(written.items()))
    assert again.keys() == written.keys(), "weights out of a checkpoint, which rounds install, stay as they are"


def test_one_parameter_is_held_at_a_time(tmp_path: Path) -> None:
    folder = save_tiny_moe(tmp_path / "moe")
    asked: list[str] = []

    def weights():
        for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
            asked.append(name)
            yield name, weight.detach()

    converted = CheckpointNames.of(str(folder)).convert(weights())
    names = [name for name, _ in zip((name for name, _ in converted), range(12), strict=False)]
    assert len(asked) <= len(names), "nothing is read ahead"


def test_a_model_without_experts_passes_as_it_is(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_policy(tmp_path / "policy"))
    named = [(name, weight.detach()) for name, weight in model.named_parameters()]
    assert [(name, id(tensor)) for name, tensor in CheckpointNames.of(str(tmp_path / "policy")).convert(named)] == [
        (name, id(tensor)) for name, tensor in named
    ]
