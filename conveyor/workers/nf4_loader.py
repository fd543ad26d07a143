"""Loads a model into vLLM with the values that its weights have in 4 bits, so that the engine samples from the policy that is trained.

The weights themselves are whole: dequantised one by one as they come out of the files. (`rollout.engine_args: {quantization:
bitsandbytes}` keeps them in 4 bits, on GPUs.) vLLM's processes know the load format once they have imported this module.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from conveyor.models.quantized import quantized_names, rounded

LOAD_FORMAT = "conveyor_nf4"


@register_model_loader(LOAD_FORMAT)
class Nf4Loader(DefaultModelLoader):
    """`model_loader_extra_config`: `dtype`, that of the trained model, whose values are quantised."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))
        self._dtype = getattr(torch, load_config.model_loader_extra_config["dtype"])

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        names = quantized_names(model_config.hf_text_config)
        weights: Iterable[tuple[str, Tensor]] = super().get_all_weights(model_config, model)
        for name, weight in weights:
            yield name, rounded(weight.to(self._dtype)) if name in names else weight


class Registered:
    """Extends vLLM's workers by nothing: what they import for it registers the loader."""
