"""Low-rank adapters (Hu et al. 2021, LoRA), put into the layers of a model in place, so that it stays the model it was.

A linear layer W becomes `base_layer` (W, frozen) with `lora_A` [r, in] and `lora_B` [out, r]: x ↦ Wx + s·BAx, s = alpha/r, or alpha/√r
(Kalajdzievski 2023, rsLoRA). B starts at 0. With DoRA (Liu et al. 2024) the rows of W + s·BA are brought to lengths m, which are
learnt: `lora_magnitude_vector` [out], at first the lengths of W's rows. W may be a 4-bit weight (`quantized.py`).

    with adapters_off(model): …       # the model as it was before training, to the last bit: a reference without a second copy
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor.config import sections
from conveyor.errors import UserError
from conveyor.models.quantized import check_quantization, forget_quantization

if TYPE_CHECKING:  # peft takes two seconds to import, and every worker of every run imports this
    from peft import LoraConfig

HEAD = "score"
"""The layer of a scalar model that is trained as a whole."""


def add_adapter(model: PreTrainedModel, lora: sections.Lora, seed: int = 0) -> None:
    """Freeze the model, but for a scalar head, and give its linear layers adapters.

    Args:
        seed: of A, so that all ranks, and all runs, start alike.

    Raises:
        UserError: no linear layer has a name of `target_modules`.
    """
    from peft import inject_adapter_in_model

    targets = _targets(model, lora)
    model.requires_grad_(False)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(lora_config(lora, targets), model)
    forget_quantization(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # of 4-bit layers they come in float32
            parameter.data = parameter.data.to(dtype)
    head = getattr(model, HEAD, None)
    if head is not None:
        head.requires_grad_(True)


def check_lora(config: PretrainedConfig, lora: sections.Lora) -> None:
    """What `add_adapter` raises of a model of this config, without its weights; and a package that is missing."""
    with torch.device("meta"):
        _targets(AutoModelForCausalLM.from_config(config), lora)
    if lora.quantization is not None:
        check_quantization("lora.quantization")


def _targets(model: PreTrainedModel, lora: sections.Lora) -> Iterable[str]:
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


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model computes with its frozen weights alone. A scalar head stays as it is trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # peft switches gradients off and on with the adapters, of those too that were frozen.
    trained = {parameter: parameter.requires_grad for layer in layers for parameter in layer.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)


def is_adapted(names: Iterable[str]) -> bool:
    """Whether these are the weights of a model with adapters."""
    return any(".lora_" in name for name in names)


def is_trained(name: str) -> bool:
    """Whether a weight of a model with adapters is trained, and so travels: the adapters', and a scalar head."""
    return ".lora_" in name or name.startswith(f"{HEAD}.")


def carried(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a publication brings to a model, by name: all weights, or of one with adapters those that are trained; tied ones often."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {name: parameter for name, parameter in own.items() if is_trained(name)} if is_adapted(own) else own


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model without adapters that computes the same: W + s·BA where there is an adapter, as DoRA with its lengths.

    Args:
        weights: (name, full tensor, dequantised) of the model with adapters, each layer's side by side; a tensor need stay
            valid only until the next one is asked for.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}

    def layer_of(entry: tuple[str, Tensor]) -> str | None:
        layer = entry[0].partition(".lora_")[0].partition(".base_layer.")[0]
        return layer if layer in layers else None

    for layer, entries in groupby(weights, layer_of):
        if layer is None:
            yield from entries
            continue
        of_layer = {name.removeprefix(f"{layer}."): tensor.clone() for name, tensor in entries}
        adapted: Any = layers[layer]
        of_layer["base_layer.weight"] = merged_weight(of_layer, adapted.scaling["default"])
        for name, tensor in of_layer.items():
            if name.startswith("base_layer."):
                yield f"{layer}.{name.removeprefix('base_layer.')}", tensor


def merged_weight(layer: dict[str, Tensor], scaling: float) -> Tensor:
    """[out, in], in the dtype of the frozen weight, summed in float32: of one layer's tensors by their names in it."""
    low, high = (layer[f"lora_{side}.default.weight"].float() for side in "AB")
    weight = layer["base_layer.weight"].float() + scaling * (high @ low)
    lengths = layer.get("lora_magnitude_vector.default.weight")
    if lengths is not None:
        weight = weight * (lengths.float() / weight.norm(dim=1))[:, None]
    return weight.to(layer["base_layer.weight"].dtype)


def lora_config(lora: sections.Lora, targets: Iterable[str], **settings: Any) -> LoraConfig:
    """peft's words for the same."""
    from peft import LoraConfig

    alpha: Any = lora.alpha  # peft declares a whole number, and scales by any
    return LoraConfig(
        r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(targets), use_rslora=lora.use_rslora,
        use_dora=lora.use_dora, **settings,
    )  # fmt: skip
