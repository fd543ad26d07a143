"""Weights under the names, and in the form, that checkpoints of a model have.

    in memory (transformers)                              in a checkpoint, and what vLLM loads
    layers.0.mlp.experts.gate_up_proj   [E, 2·I, H]  ──▶  layers.0.mlp.experts.0.gate_proj.weight   [I, H]
                                                          layers.0.mlp.experts.0.up_proj.weight     [I, H]
                                                          …

Transformers keeps the experts of a layer in one parameter, and turns it into a checkpoint's tensors when it saves. The same is done
here for one parameter at a time, so that a model on its way is never held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key


class CheckpointNames:
    """From a model's own names to those of its checkpoints.

    Parameters of which several become one tensor of the checkpoint pass through as they are: what loads them has to know both forms.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        forward = [
            transform for transform in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(transform, PrefixChange)
        ]
        reverse: list[Any] = [transform.reverse_transform() for transform in reversed(forward)]
        self._model = model
        self._renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in reverse if isinstance(entry, WeightConverter) and len(entry.source_patterns) == 1]
        self._by_pattern = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}

    @classmethod
    def of(cls, path: str) -> CheckpointNames:
        """Of the language model in a folder, from its configuration alone."""
        with torch.device("meta"):
            return cls(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the checkpoint, parameter by parameter, in their order; beside it at most one parameter is copied."""
        for name, tensor in weights:
            renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
            if pattern is None:
                yield renamed, tensor
                continue
            converter: Any = deepcopy(self._by_pattern[pattern])  # it collects what it is given
            converter.add_tensor(renamed, name, pattern, tensor)
            found = converter.convert(renamed, model=self._model, config=self._model.config)
            for key, value in found.items():
                yield key, value[0] if isinstance(value, list) else value
