"""Adapters as peft and vLLM read them: adapter_config.json and adapter_model.safetensors in one folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from conveyor.config import sections
from conveyor.models.adapters import HEAD, is_trained, lora_config
from conveyor.run_folder import complete_or_absent


def write_adapter(lora: sections.Lora, weights: Iterable[tuple[str, Tensor]], base: str, folder: Path) -> None:
    """The adapter alone, complete or absent; of a scalar model with its head.

    Args:
        weights: (name, tensor) of the model with adapters; those that are not trained are passed over.
        base: where the model without adapter is.
    """
    with complete_or_absent(folder) as aside:
        fill(lora, {name: weight.contiguous() for name, weight in weights if is_trained(name)}, base, aside)


def fill(lora: sections.Lora, weights: dict[str, Tensor], base: str, folder: Path) -> None:
    """Write the files into a folder that is there. `weights`: those that are trained."""
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights if ".lora_" in name}
    scalar = any(name.startswith(f"{HEAD}.") for name in weights)
    config = lora_config(lora, targets, task_type="SEQ_CLS" if scalar else "CAUSAL_LM", modules_to_save=[HEAD] if scalar else None)
    config.base_model_name_or_path = base
    config.inference_mode = True
    save_file(
        {_peft_name(name): weight for name, weight in weights.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    config.save_pretrained(str(folder))


def _peft_name(name: str) -> str:
    """DoRA's lengths stand without `.weight`."""
    return f"base_model.model.{name.replace('lora_magnitude_vector.default.weight', 'lora_magnitude_vector').replace('.default.', '.')}"
