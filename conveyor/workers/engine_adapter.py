"""A policy that is a base and an adapter, in a vLLM engine: the base is loaded once, each version's adapter takes the place of the last.

All requests name one adapter. vLLM reads adapters from folders, so a version's is written to shared memory, read by every
tensor-parallel rank, and gone again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from conveyor.config import sections
from conveyor.models.adapter_files import fill

SHARED_MEMORY = Path("/dev/shm")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has room for; others get the next larger one's."""


def engine_arguments(lora: sections.Lora, model: sections.Model, given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's for a policy with an adapter. `given`: `rollout.engine_args`, which may quantise the base in the engine itself."""
    arguments: dict[str, Any] = {}
    if lora.travels:
        rank = next(rank for rank in RANKS if rank >= lora.rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
        if lora.quantization is not None and "quantization" not in given:
            from conveyor.workers.nf4_loader import LOAD_FORMAT

            arguments |= {
                "load_format": LOAD_FORMAT,
                "model_loader_extra_config": {"dtype": model.dtype},
                "worker_extension_cls": "conveyor.workers.nf4_loader.Registered",
            }
    return arguments


class EngineAdapter:
    """The adapter that an engine's requests sample with."""

    def __init__(self, engine: Any, lora: sections.Lora, base: str) -> None:
        self._engine, self._lora, self._base = engine, lora, base
        self.request: Any = None
        """What a request is to name; None before the first install: the base samples alone, as a new adapter changes nothing."""

    def install(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Between two engine steps; running requests go on with it."""
        from vllm.lora.request import LoRARequest

        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="conveyor-adapter-", dir=shared) as folder:
            fill(self._lora, {name: weight.contiguous() for name, weight in weights}, self._base, Path(folder))
            loaded = self._engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            assert loaded, "the engine refused the adapter"
            self.request = LoRARequest("policy", 1, folder)
