"""What the training engine keeps in memory on each of two ranks, counted tensor by tensor."""

from __future__ import annotations

import gc
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import LlamaForCausalLM

from conveyor.config import sections
from conveyor.models.train_engine import TrainEngine
from tests.tiny import tiny_config

SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8)
"""Layers are most of it, so that buckets are little."""
CASES: list[tuple[str, int, str]] = [
    ("float32", 0, "none"), ("float32", 2, "none"), ("bfloat16", 1, "none"), ("bfloat16", 2, "none"), ("bfloat16", 3, "none"),
]  # fmt: skip


def count(rank: int, ranks: int, port: int, folder: Path, cases: list[tuple[str, int, str]]) -> None:
    """Writes bytes a parameter of every case, between an update's last backward pass and its step."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found = {}
    for dtype, stage, offload in cases:
        before = _live()
        train = sections.Train(zero_stage=stage, offload_optimizer=offload)
        model = LlamaForCausalLM(tiny_config(**SIZES)).to(getattr(torch, dtype))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = TrainEngine(model, train, learning_rate=1e-3, total_updates=4, dtype=dtype, accelerator="cpu")
        ids = torch.arange(8)[None]
        for update in range(2):
            engine.backward(engine.forward(_loss, ids), last=True)
            if update == 0:
                engine.step(1.0)  # after which the optimizer has its moments
        gc.collect()
        found[f"{dtype} {stage} {offload}"] = (_live() - before) / parameters
        engine.step(1.0)
        del engine, model
        gc.collect()
    if rank == 0:
        (folder / "kept.json").write_text(json.dumps(found))


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.float().sum()


def _live() -> int:
    """Bytes of all tensors' memory, each once."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
