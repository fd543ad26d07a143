"""Frozen weights of 4 bits (Dettmers et al. 2023, QLoRA), through bitsandbytes: nf4, blocks of 64 with an absolute maximum in float32 each.

What is trained is the model of the *dequantised* weights: each layer multiplies with them, in the model's dtype, so any other copy of
the same values (an engine's, a merged checkpoint's) is the same policy. The maxima are not quantised a second time (QLoRA's double
quantisation would save 0.4 bit a weight): whoever quantises the same weights, on whatever device, is to get the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor.errors import UserError

WHOLE = ("lm_head", "score")
"""Layers that stay as they are: those that give logits and scores."""


def check_quantization(key: str) -> None:
    """Raises:
    UserError: the package that quantises is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(f"{key}: nf4 needs the package bitsandbytes, which cannot be imported: {error}") from None


def quantizing(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make linear layers 4-bit ones as they come out of the files."""
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=False,
            llm_int8_skip_modules=list(WHOLE),
        )
    }


def is_quantized(parameter: Tensor) -> bool:
    return getattr(parameter, "quant_state", None) is not None


def values(parameter: Tensor) -> Tensor:
    """What a weight stands for: itself, or its dequantised values in the dtype that it had before."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)  # type: ignore[attr-defined]
    return found


def rounded(weight: Tensor) -> Tensor:
    """The values of a weight [out, in] once it is quantised, in its dtype."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    found: Tensor = dequantize_4bit(*quantize_4bit(weight.contiguous(), quant_type="nf4"))
    return found


def round_weights(model: PreTrainedModel) -> None:
    """Give the linear layers of a whole model the values that they would have in 4 bits."""
    with torch.no_grad():
        for _, layer in _linear(model):
            layer.weight.copy_(rounded(layer.weight))


def quantized_names(config: PretrainedConfig) -> set[str]:
    """Names of the weights that `quantizing` makes 4-bit ones in a language model of this config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {f"{name}.weight" for name, _ in _linear(model)}


def _linear(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in WHOLE:
            yield name, module


def forget_quantization(model: PreTrainedModel) -> None:
    """Let transformers save the model as one whose weights are whole, which is what is written: see `values`."""
    if getattr(model, "hf_quantizer", None) is None:
        return
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_quantized"):
        vars(model).pop(name, None)
    del model.config.quantization_config
