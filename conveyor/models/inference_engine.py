"""A model that only answers, cut over the ranks of a group by ZeRO-3: a reference, reward model or snapshot that no device holds whole.

    with partitioning(dtype, accelerator, placed):
        model = load_language_model(section)          # no rank ever has all of it
    engine = InferenceEngine(model, accelerator=…)
    logprobs, entropy = engine.forward(response_logprobs, tokens, …)
    engine.overwrite(named_tensors)                   # what a publication brings, a bucket at a time

Layers are put together when they are about to be computed, and let go of after it. Every rank makes the same calls in the same order; one
that has nothing to compute runs any sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conveyor.models.adapters import carried
from conveyor.models.callee import Callee
from conveyor.models.routing import expert_blocks
from conveyor.models.zero import BYTES_AT_A_TIME, full_size, gather_whole, offloading, quiet, start_deepspeed, whole

P = ParamSpec("P")
R = TypeVar("R")


class InferenceEngine:
    """A model under DeepSpeed's ZeRO-3, without optimizer or gradients.

    Args:
        module: a Hugging Face model, partitioned already (`zero.partitioning`) or not yet.
        accelerator: `cpu` or `cuda`. `torch.distributed` is already initialised.
        offload_parameters: where each rank keeps its part until a layer needs it: `none` (the device), `cpu` or `nvme`.
        nvme_path: folder on a local drive, for `nvme`.
        bucket_bytes: full weights that `overwrite` and `named_weights` gather at a time.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        accelerator: Literal["cpu", "cuda"],
        offload_parameters: str = "none",
        nvme_path: str | None = None,
        bucket_bytes: int = BYTES_AT_A_TIME,
    ) -> None:
        deepspeed = start_deepspeed(accelerator)
        self.model = module.eval().requires_grad_(False)
        self._bucket_bytes = bucket_bytes
        dtype = next(module.parameters()).dtype
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": None,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": {"stage": 3, "overlap_comm": accelerator == "cuda"}
            | offloading(accelerator, parameters=offload_parameters, nvme_path=nvme_path),
        }
        gather_whole(expert_blocks(module))
        with quiet():
            self._engine = deepspeed.initialize(model=Callee(module), config=config)[0]
        self._engine.eval()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._engine.device
        return device

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`function(model, *args, **kwargs)` without gradients; everything that reads weights happens inside."""
        # Weights that stay gathered must not be inference tensors, whatever mode the caller is in: they are written to later.
        with torch.inference_mode(False), torch.no_grad():
            found: R = self._engine(*args, function=function, **kwargs)
        return found

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put named full tensors, the same on every rank, in the place of the model's. Tied weights may come under any of their names.

        Raises:
            RuntimeError: a weight of the model never came, or one came that it does not have.
        """
        own = carried(self.model)
        missing = {id(parameter): name for name, parameter in own.items()}
        bucket: list[tuple[nn.Parameter, Tensor]] = []
        size = 0
        for name, tensor in weights:
            if name not in own:
                raise RuntimeError(f"the model has no weight {name}")
            nbytes = full_size(own[name]) * own[name].element_size()
            if bucket and size + nbytes > self._bucket_bytes:
                self._write(bucket)
                bucket, size = [], 0
            bucket.append((own[name], tensor.clone()))  # the next tensor may take its place
            size += nbytes
            missing.pop(id(own[name]), None)
        self._write(bucket)
        if missing:
            raise RuntimeError(f"weights never came: {', '.join(sorted(missing.values()))}")

    def _write(self, bucket: list[tuple[nn.Parameter, Tensor]]) -> None:
        with torch.inference_mode(False), torch.no_grad(), whole([parameter for parameter, _ in bucket], write=True):
            for parameter, tensor in bucket:
                if parameter.shape != tensor.shape:
                    raise RuntimeError(f"a weight of shape {tuple(tensor.shape)} came for one of {tuple(parameter.shape)}")
                parameter.data.copy_(tensor)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor on CPU), tied weights once; valid until the next one is asked for. Every rank iterates to the end."""
        names = carried(self.model)
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if name in names]
        numbers = itertools.accumulate(full_size(parameter) * parameter.element_size() for _, parameter in named)
        for _, group in itertools.groupby(zip(named, numbers, strict=True), key=lambda entry: entry[1] // self._bucket_bytes):
            bucket = [one for one, _ in group]
            with whole([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach().cpu()
