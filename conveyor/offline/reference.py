"""Log-probabilities under the reference: asked once, before training, and kept on disk.

The reference never changes, and which samples it is asked about is known before the first update. So no second model stays in memory
while the first is trained, and several passes, or several runs with the same folder, ask it once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist
from transformers import AutoConfig

from conveyor.config import sections
from conveyor.data.samples import Sample
from conveyor.models.answering import Answering, WholeModel
from conveyor.models.inference_engine import InferenceEngine
from conveyor.models.language_model import load_language_model
from conveyor.models.sample_logprobs import sample_logprobs
from conveyor.models.zero import loading

log = logging.getLogger(__name__)

Accelerator = Literal["cpu", "cuda"]


def reference_logprobs(
    model: sections.Model, samples: Sequence[Sample], folder: Path, batch: int, accelerator: Accelerator, train: sections.Train,
    compute: Callable[[Sequence[Sample]], Tensor] | None = None, quantization: str | None = None,
) -> Tensor:  # fmt: skip
    """float32 [M]: of each sample's masked tokens, from the folder if they are there, else computed on all ranks and written there.

    Args:
        batch: samples in one pass of a rank.
        train: with ZeRO-3 the ranks hold one copy of the reference together.
        compute: samples → float32 [m], on every rank, by a model that is there already; default: one is loaded, and let go.
        quantization: of that model's weights.
    """
    digest = _digest(model, samples, quantization)
    file = folder / f"{digest}.safetensors"
    kept = _kept(file, len(samples))
    if not _everywhere(kept is not None):
        if compute is not None:
            values = shared_out(compute, samples, batch, train.sequence_parallel_size)
        else:
            values = over_ranks(_load(model, accelerator, train), samples, batch)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            aside = file.with_name(f".{file.name}.{os.getpid()}.partial")  # other runs may be writing the same
            save_file({"logprobs": values}, str(aside))
            aside.replace(file)
        return values
    assert kept is not None
    return kept


def _kept(file: Path, size: int) -> Tensor | None:
    """What a file holds; None where it is not there, or damaged."""
    if not file.is_file():
        return None
    try:
        values = load_file(str(file))["logprobs"]
        if values.shape == (size,) and values.isfinite().all():
            return values
        reason = "it holds other values"
    except (SafetensorError, KeyError, OSError) as error:
        reason = str(error)
    log.warning("%s is damaged (%s), so the reference is asked anew", file, reason)
    return None


def over_ranks(model: Answering, samples: Sequence[Sample], batch: int) -> Tensor:
    """float32 [M]: log-probs of the samples, on the CPU of every rank; each rank computes a share."""
    return shared_out(partial(model.forward, sample_logprobs), samples, batch)


def shared_out(compute: Any, samples: Sequence[Sample], batch: int, of_row: int = 1) -> Tensor:
    """float32 [M], on the CPU of every rank, of `compute(some samples) -> [m]`, which is called as often on every rank.

    Args:
        of_row: neighbouring ranks that compute the same samples together.
    """
    rank, ranks = dist.get_rank() // of_row, dist.get_world_size() // of_row
    order = sorted(range(len(samples)), key=lambda place: len(samples[place].ids), reverse=True)
    found = torch.zeros(len(samples))
    for first in range(0, len(order), batch * ranks):
        places = order[first : first + batch * ranks]
        mine = places[rank::ranks]
        values = compute([samples[place] for place in mine or places[:1]])
        if mine and dist.get_rank() % of_row == 0:
            found[torch.tensor(mine)] = values.detach().float().cpu()
    if dist.get_world_size() > 1:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = torch.stack(parts).sum(0)  # every place is of one rank, 0 on the others
    return found


def _everywhere(there: bool) -> bool:
    """Whether all ranks say so; without a shared file system they may not, and then all compute."""
    parts: list[Any] = [there] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(parts, there)
    return all(parts)


def _load(model: sections.Model, accelerator: Accelerator, train: sections.Train) -> Answering:
    plain = model.model_copy(update={"gradient_checkpointing": False})
    with loading(train, model.dtype, accelerator):
        loaded = load_language_model(plain)
    if train.zero_stage < 3:
        return WholeModel(loaded, torch.device(accelerator))
    return InferenceEngine(loaded, accelerator=accelerator, offload_parameters=train.offload_parameters, nvme_path=train.nvme_path)


def _digest(model: sections.Model, samples: Sequence[Sample], quantization: str | None) -> str:
    """Changes with the weights, the type they are computed in, and every token and mask."""
    found = hashlib.sha256(json.dumps([model.dtype, _weights(model.path), *([quantization] if quantization else [])]).encode())
    for sample in samples:
        found.update(len(sample.ids).to_bytes(8, "little"))
        found.update(sample.ids.tobytes())
        found.update(sample.mask.tobytes())
    return found.hexdigest()[:32]


def _weights(path: str) -> Any:
    """What tells one model from another: files with their sizes and times, or the commit of a hub id."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"])
        return [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return [path, getattr(AutoConfig.from_pretrained(path), "_commit_hash", None)]
