"""DeepSpeed as the engines of this package start it, and models whose weights are partitioned by ZeRO-3.

    with loading(train, dtype, accelerator):       # ZeRO-3: every rank keeps its part of each weight as it comes out of the files
        model = load_language_model(section)
    with whole([head.weight], write=True):          # one weight, in full, on every rank; what rank 0 writes into it stays
        ...

Without ZeRO-3 both do nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from conveyor.errors import UserError

if TYPE_CHECKING:
    from conveyor.config import sections

LAYER = re.compile(r".*?\.\d+\.")
"""Of a tensor's name, what says in which layer it is."""
BYTES_AT_A_TIME = 256 * 2**20
"""Full weights that ZeRO-3 gathers at a time when they are overwritten."""


def start_deepspeed(accelerator: str) -> Any:
    """The package, for `cpu` or `cuda`, without what it says and builds of itself."""
    if accelerator == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # a worker sees only its own device
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPU: compiling them takes minutes, and gloo is there already.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def offloading(accelerator: str, optimizer: str = "none", parameters: str = "none", nvme_path: str | None = None) -> dict[str, Any]:
    """DeepSpeed's words for where optimizer state and parameters are kept: each `none`, `cpu` or `nvme`."""

    def place(device: str) -> dict[str, Any]:
        return {"device": device, "pin_memory": accelerator == "cuda"} | ({"nvme_path": nvme_path} if device == "nvme" else {})

    of = {"offload_optimizer": optimizer, "offload_param": parameters}
    return {key: place(device) for key, device in of.items() if device != "none"}


def check_nvme(train: sections.Train) -> None:
    """Asked of the machine that trains.

    Raises:
        UserError: something is to be offloaded to nvme, and DeepSpeed cannot read and write files beside its work here.
    """
    keys = [key for key in ("offload_optimizer", "offload_parameters") if getattr(train, key) == "nvme"]
    if not keys:
        return
    if not Path(train.nvme_path or "").is_dir():
        raise UserError(f"train.nvme_path: {train.nvme_path}: no such folder on {socket.gethostname()}")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with quiet():
        able = AsyncIOBuilder().is_compatible()
    if not able:
        missing = f"libaio with its headers (libaio-dev), which {socket.gethostname()} has not"
        raise UserError(f"train.{keys[0]}: nvme needs {missing}; install it, or use cpu")


@contextlib.contextmanager
def loading(train: sections.Train, dtype: str, accelerator: str) -> Iterator[None]:
    """Models that transformers loads meanwhile come partitioned over the ranks, if they are to be trained with ZeRO-3.

    Files are mapped, and one module's weights at a time exist in full. `torch.distributed` is initialised; every rank loads
    the same models in the same order.
    """
    check_nvme(train)
    placed = offloading(accelerator, parameters=train.offload_parameters, nvme_path=train.nvme_path)
    with partitioning(dtype, accelerator, placed) if train.zero_stage == 3 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def partitioning(dtype: str, accelerator: str, placed: dict[str, Any]) -> Iterator[None]:
    """Models loaded meanwhile are partitioned. `placed`: as `offloading` gives it."""
    start_deepspeed(accelerator)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers asks this object, which it does not keep alive, whether and how to partition.
    asked = HfDeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            # All buffers: DeepSpeed would round rotary frequencies to bfloat16, which turns far tokens by whole radians.
            "data_types": {"keep_in_fp32_modules": ["*"]},
            "zero_optimization": {"stage": 3} | placed,
        }
    )
    try:
        with quiet(), _layer_by_layer():
            yield
    finally:
        unset_hf_deepspeed_config()
        del asked


@contextlib.contextmanager
def _layer_by_layer() -> Iterator[None]:
    """transformers takes all files' tensors at once, and makes of them what the model's layers need: of every layer's experts one tensor,
    which would be a second copy of a mixture on every rank. Here it gets one layer's tensors at a time."""
    from transformers import modeling_utils

    its: Any = modeling_utils
    load: Callable[..., tuple[list[str], set[str]]] = its._load_state_dict_into_zero3_model

    def loaded(model: nn.Module, state: dict[str, Any], asked: Any) -> tuple[list[str], set[str]]:
        layers: dict[str, dict[str, Any]] = {}
        own = dict(model.named_parameters()) if asked.ignore_mismatched_sizes else {}
        for name, tensor in state.items():
            if getattr(own.get(name), "ds_shape", tensor.shape) != tensor.shape:
                continue  # it stays missing, as transformers has it without ZeRO
            found = LAYER.match(name)
            layers.setdefault(found[0] if found else "", {})[name] = tensor
        errors, missing = [], set(model.state_dict())
        for tensors in layers.values():
            wrong, others = load(model, tensors, asked)
            errors += wrong
            missing &= others
        return errors, missing

    its._load_state_dict_into_zero3_model = loaded
    try:
        yield
    finally:
        its._load_state_dict_into_zero3_model = load


def is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def full_size(parameter: nn.Parameter) -> int:
    """Elements of the whole weight: under ZeRO-3 the parameter itself is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole(parameters: Iterable[nn.Parameter], write: bool = False) -> contextlib.AbstractContextManager[Any]:
    """These weights in full, on every rank, for the time of the context. Every rank enters it.

    Args:
        write: they are changed, in the same way on every rank; the parts are cut from rank 0's.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None)
    return gathered


def gather_whole(blocks: Iterable[nn.Module]) -> None:
    """Have ZeRO-3 gather each of these modules at once when it is called: blocks of experts, of which every rank's tokens go to others.
    Ranks that gathered one expert after the other, each its own, would wait for each other forever. DeepSpeed knows some models' blocks
    by itself."""
    from deepspeed.utils import set_z3_leaf_modules

    for block in blocks:
        set_z3_leaf_modules(block, [type(block)])


def quiet() -> contextlib.AbstractContextManager[Any]:
    """DeepSpeed and transformers print progress that means nothing to a user."""
    return contextlib.redirect_stdout(io.StringIO())
