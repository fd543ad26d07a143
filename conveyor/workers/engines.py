"""The engine that a recipe names."""

from __future__ import annotations

import os
from typing import Any

import torch

from conveyor.config import sections
from conveyor.workers.engine import Engine
from conveyor.workers.engine_adapter import EngineAdapter
from conveyor.workers.engine_requests import EngineRequests
from conveyor.workers.transformers_engine import start_transformers_engine
from conveyor.workers.vllm_engine import set_environment, start_engine


def prepare_process(rollout: sections.Rollout, cores: tuple[int, ...] | None) -> None:
    """What has to come before the engine's libraries are imported. `cores`: ids on CPU; None: GPU."""
    if rollout.engine == "vllm":
        set_environment(rollout, cores)
    elif cores is not None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def start(
    model: sections.Model,
    rollout: sections.Rollout,
    max_model_len: int | None,
    cores: tuple[int, ...] | None,
    lora: sections.Lora | None = None,
) -> tuple[Engine, Any]:
    """The engine, of version 0, and its tokenizer; vLLM is imported only where the recipe names it. `lora`: the policy has an adapter."""
    if rollout.engine == "transformers":
        return start_transformers_engine(model, rollout, max_model_len, torch.device("cuda" if cores is None else "cpu"))
    engine, tokenizer = start_engine(model, rollout, max_model_len, lora)
    adapter = EngineAdapter(engine, lora, model.path) if lora is not None and lora.travels else None
    return EngineRequests(engine, rollout, adapter), tokenizer
