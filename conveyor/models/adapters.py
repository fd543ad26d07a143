"""Low-rank adapters (Hu et al. 2021, LoRA), put into the layers of a model in place, so that it stays the model it was.

A linear layer W becomes `base_layer` (W, frozen) with `lora_A` [r, in] and `lora_B` [out, r]: x ↦ Wx + alpha/r · BAx. B starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor.config import UserError
from conveyor.config.offline import Lora
from conveyor.run_folder import complete_or_absent

HEAD = "score"
"""The layer of a scalar model that is trained as a whole."""


def add_adapter(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the model, but for a scalar head, and give its linear layers adapters.

    Raises:
        UserError: no linear layer has a name of `target_modules`.
    """
    targets = _targets(model, lora)
    model.requires_grad_(False)
    inject_adapter_in_model(_config(lora, targets), model)
    head = getattr(model, HEAD, None)
    if head is not None:
        head.requires_grad_(True)


def check_targets(config: PretrainedConfig, lora: Lora) -> None:
    """What `add_adapter` raises of a model of this config, without its weights."""
    with torch.device("meta"):
        _targets(AutoModelForCausalLM.from_config(config), lora)


def _targets(model: PreTrainedModel, lora: Lora) -> Iterable[str]:
    """Names of the linear layers that get adapters."""
    output = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output and name != HEAD
    }
    if not linear:
        raise UserError(f"lora: a {model.config.model_type} model has no linear layers that adapters could be put into")
    unknown = sorted(set(lora.target_modules) - linear)
    if unknown:
        raise UserError(f"lora.target_modules: no linear layer is named {unknown[0]}; the model has {', '.join(sorted(linear))}")
    return lora.target_modules or linear


def merged(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights, by name, as those of the model without adapters: W + alpha/r · BA where there is one."""
    layers = dict(model.named_modules())
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            low, high = (weights[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
            weight = (weight.float() + layers[layer].scaling["default"] * (high @ low)).to(weight.dtype)
        out[plain] = weight
    return out


def is_adapted(names: Iterable[str]) -> bool:
    """Whether these are the weights of a model with adapters."""
    return any(".lora_" in name for name in names)


def write_adapter(model: PreTrainedModel, lora: Lora, weights: dict[str, Tensor], base: str, folder: Path) -> None:
    """The adapter alone, as peft loads it; complete or absent.

    Args:
        weights: the model's, by name.
        base: where the model without adapter is.
    """
    named = {name.replace(".default.", "."): weight for name, weight in weights.items() if ".lora_" in name}
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in named}
    head = {name: weight for name, weight in weights.items() if name.startswith(f"{HEAD}.")}
    config = _config(lora, targets, task_type="SEQ_CLS" if head else "CAUSAL_LM", modules_to_save=[HEAD] if head else None)
    config.base_model_name_or_path = base
    config.inference_mode = True
    with complete_or_absent(folder) as aside:
        tensors = {f"base_model.model.{name}": weight.contiguous() for name, weight in (named | head).items()}
        save_file(tensors, str(aside / "adapter_model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(str(aside))


def _config(lora: Lora, targets: Iterable[str], **settings: Any) -> LoraConfig:
    alpha: Any = lora.alpha  # peft declares a whole number, and scales by any
    return LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(targets), **settings)
