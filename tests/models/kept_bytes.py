"""What the training engine keeps in memory on each of several ranks, counted tensor by tensor."""

from __future__ import annotations

import gc
import multiprocessing
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import LlamaForCausalLM

from conveyor.config import sections
from conveyor.models.train_engine import TrainEngine
from tests.tiny import tiny_config

SIZES: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8)
"""Layers are most of it, so that buckets are little."""
Case = tuple[sections.DType, int]
"""(type, ZeRO stage)"""


def count(rank: int, ranks: int, port: int, folder: Path, cases: list[Case]) -> None:
    """Writes bytes a parameter of every case, between an update's last backward pass and its step. Each has a process of its own, as
    DeepSpeed lets go of little."""
    for case in cases:
        process = multiprocessing.get_context("fork").Process(target=_one, args=(rank, ranks, folder, *case))
        process.start()
        process.join()
        assert process.exitcode == 0


def result(folder: Path, dtype: str, stage: int) -> float:
    return float((folder / f"{dtype}_{stage}.txt").read_text())


def _one(rank: int, ranks: int, folder: Path, dtype: sections.DType, stage: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{dtype}_{stage}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    before = _live()
    model = LlamaForCausalLM(tiny_config(**SIZES)).to(getattr(torch, dtype))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train = sections.Train.model_validate({"zero_stage": stage})
    engine = TrainEngine(model, train, learning_rate=1e-3, total_updates=4, dtype=dtype, accelerator="cpu")
    for update in range(2):
        engine.backward(engine.forward(_loss, torch.arange(8)[None]), last=True)
        if update == 0:
            engine.step(1.0)  # after which the optimizer has its moments
    gc.collect()
    if rank == 0:
        (folder / f"{dtype}_{stage}.txt").write_text(str((_live() - before) / parameters))
    dist.barrier()


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.float().sum()


def _live() -> int:
    """Bytes of all tensors' memory, each once."""
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects of old names say so when they are looked at
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta]
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor in (*tensors, *gradients):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
