"""One model being trained on one rank under DeepSpeed.

    for micro_batch in update:
        outputs = engine.forward(function, *tensors)      # function(model, *tensors)
        engine.backward(loss_sum(outputs), last=…)        # adds the gradient of a SUM
    report = engine.step(denominator)                     # summed gradient / denominator, clip, AdamW

Every rank makes the same calls in the same order: ZeRO gathers and reduces inside them. A rank that
has no samples runs a batch whose loss is 0 times its outputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from conveyor.config import sections
from conveyor.models.adapter_files import write_adapter
from conveyor.models.adapters import is_adapted, merged
from conveyor.models.apart import ApartGradients, linear
from conveyor.models.callee import Callee
from conveyor.models.quantized import values
from conveyor.models.routing import expert_blocks
from conveyor.models.zero import full_size, gather_whole, offloading, quiet, start_deepspeed, whole
from conveyor.run_folder import complete_or_absent
from conveyor.workers.reports import StepReport

P = ParamSpec("P")
R = TypeVar("R")

GATHER_BYTES = 256 * 2**20
"""Full weights that ZeRO-3 gathers at a time when they are read."""
REDUCE_ELEMENTS = 50_000_000
"""Gradient elements that ZeRO reduces at a time (unless one tensor is larger)."""
TAG = "state"
"""DeepSpeed's name for the one checkpoint in a folder."""


class TrainEngine:
    """A model, its AdamW and its schedule under DeepSpeed.

    Args:
        module: a Hugging Face model, cut over the ranks already (`zero.loading`) or not.
        total_updates: optimizer steps of the whole run, for the schedule.
        dtype: of weights in forward and backward. With bfloat16 the optimizer holds fp32 weights and
            gradients are summed in fp32; stage 0 then runs as stage 1, which keeps the same weights
            on every rank, because DeepSpeed sums in bfloat16 without ZeRO.
        accelerator: `cpu` or `cuda`. `torch.distributed` is already initialised.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        train: sections.Train,
        *,
        learning_rate: float,
        total_updates: int,
        dtype: sections.DType,
        accelerator: Literal["cpu", "cuda"],
    ) -> None:
        deepspeed = start_deepspeed(accelerator)
        self.model = module
        self.updates = 0
        """Updates done, skipped ones included: the place in the schedule."""
        self._train, self._peak, self._total = train, learning_rate, total_updates
        self._ranks = dist.get_world_size()
        self._apart: ApartGradients | None = None
        self._stage = train.stage(dtype)
        self._adapted = is_adapted(name for name, _ in module.named_parameters())
        self._bfloat16_unpartitioned = dtype == "bfloat16" and self._stage == 1 and train.offload_optimizer == "none"
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=learning_rate, betas=train.adam_betas, weight_decay=train.weight_decay, fused=True,
        )  # fmt: skip
        config = _deepspeed_config(module, train, self._stage, dtype, accelerator)
        if self._stage == 3:
            gather_whole(expert_blocks(module))
        with quiet():
            self._engine = deepspeed.initialize(model=Callee(module), optimizer=self._optimizer, config=config)[0]
        self._engine.set_gradient_accumulation_boundary(False)

    @property
    def module(self) -> Callable[..., Any]:
        """Calls the model's own forward."""
        return self._engine

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`function(model, *args, **kwargs)`; everything that reads weights happens inside."""
        return self._engine(*args, function=function, **kwargs)

    def backward(self, loss_sum: Tensor, *, last: bool) -> None:
        """Add the gradient of a sum (a scalar). `last`: this was the update's last micro-batch."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss_sum)

    def forward_apart(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`function(model, *args, **kwargs)` for `backward_apart`. Not under ZeRO-3."""
        return function(self.model, *args, **kwargs)

    def backward_apart(self, losses: Mapping[str, Tensor]) -> None:
        """Add the gradients of sums (scalars of one graph) to sums of their own: a full float32 gradient for each name."""
        if self._apart is None:
            self._apart = ApartGradients([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        self._apart.add(losses)

    def mix_apart(self, coefficients: Mapping[str, float], *, last: bool = True) -> None:
        """Add Σ coefficient · (sum of that name) to the update's gradient, as a `backward`; the sums are gone."""
        assert self._apart is not None, "nothing was kept apart"
        self.backward(self.forward(linear, self._apart.mixed(coefficients)), last=last)

    def gradient(self, denominator: float) -> Iterator[tuple[str, Tensor]]:
        """(name, full gradient / denominator on CPU, float32) of the update, before clipping. Every rank iterates to the end; between
        the last `backward` and `step`."""
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gradient = safe_get_full_grad(parameter)
                assert gradient is not None, f"{name} has no gradient"
                yield name, gradient.detach().float().cpu() * (self._ranks / denominator)

    def step(self, denominator: float) -> StepReport:
        """One optimizer step with (gradient summed over micro-batches and ranks) / denominator, clipped.

        With a denominator of 0, or a gradient that is not finite, the weights and the optimizer stay as
        they are. Comes after a `backward` with `last=True`.
        """
        lr = self._peak * schedule_factor(self.updates, self._total, self._train.warmup_ratio, self._train.lr_schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # DeepSpeed has averaged the sums over the ranks, so this is what is left to divide by.
        divisor = denominator / self._ranks if denominator else 1.0
        with self._optimizer_idle(when=not denominator):
            norm = self._step_unpartitioned(divisor) if self._stage == 0 else self._step_partitioned(divisor)
        self._engine.set_gradient_accumulation_boundary(False)
        self.updates += 1
        return StepReport(grad_norm=norm if denominator else 0.0, lr=lr, skipped=not denominator or not math.isfinite(norm))

    def _step_unpartitioned(self, divisor: float) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, divisor)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm))
        with self._optimizer_idle(when=not math.isfinite(norm)):
            self._engine.step()
        return norm

    def _step_partitioned(self, divisor: float) -> float:
        """DeepSpeed's ZeRO optimizers undo a loss scale before they clip: ours is the divisor."""
        optimizer = self._engine.optimizer
        if self._bfloat16_unpartitioned:
            # This one knows no loss scale; it keeps the whole reduced gradient, flat, on every rank.
            torch._foreach_div_(optimizer.fp32_groups_gradients_flat, divisor)
            self._engine.step()
        else:
            optimizer.loss_scale = divisor
            self._engine.step()
            optimizer.loss_scale = 1.0
            if optimizer.overflow:
                # With bfloat16 and offload DeepSpeed 0.19 keeps the bad gradient and adds the next ones to it.
                optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        return math.nan if optimizer.overflow else float(optimizer._global_grad_norm)

    @contextlib.contextmanager
    def _optimizer_idle(self, when: bool) -> Iterator[None]:
        """DeepSpeed clears its gradients as in any step, but AdamW does nothing."""
        if when:
            self._optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            if when:
                del self._optimizer.step

    def named_weights(self, trained: bool = False, *, cpu: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face model, full tensor on CPU), tied weights once, 4-bit ones dequantised. Every rank iterates to the end.
        `cpu` False: the tensors are where the model is.

        A tensor is valid until the next one is asked for.

        Args:
            trained: only weights that are trained: of a model with adapters those, and a scalar head.
        """
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad or not trained]
        for bucket in _buckets(named, GATHER_BYTES):
            with whole([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, values(parameter).cpu() if cpu else values(parameter)

    def save(self, folder: Path) -> None:
        """Weights (those that are trained), optimizer and place in the schedule; every rank writes its part."""
        with quiet():
            self._engine.save_checkpoint(
                str(folder), tag=TAG, save_latest=False, client_state={"updates": self.updates}, exclude_frozen_parameters=self._adapted
            )

    def load(self, folder: Path) -> None:
        """Go on from `save`, on as many ranks as it was saved from. Later updates equal those of a run that never stopped."""
        if not (folder / TAG).is_dir():
            raise ValueError(f"{folder}: no training checkpoint")
        with quiet():
            _, state = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._adapted)
        self.updates = int(state["updates"])

    def save_pretrained(self, folder: Path, tokenizer: Any, files: Mapping[str, str] | None = None) -> None:
        """A Hugging Face folder, adapters merged, complete or absent. Every rank calls it; rank 0 writes.

        Args:
            files: further ones, name → text.
        """
        weights = self.all_weights()
        if weights is not None:
            write_pretrained(self.model, dict(merged(self.model, weights.items())) if self._adapted else weights, folder, tokenizer, files)
        dist.barrier()

    def save_adapter(self, folder: Path, lora: sections.Lora, base: str) -> None:
        """The adapter alone, as peft loads it, complete or absent. Every rank calls it; rank 0 writes. `base`: the model's without it."""
        weights = [(name, weight.clone()) for name, weight in self.named_weights(trained=True)]
        if dist.get_rank() == 0:
            write_adapter(lora, weights, base, folder)
        dist.barrier()

    def all_weights(self) -> dict[str, Tensor] | None:
        """Every weight by its name, on the CPU of rank 0; None on the others. Every rank calls it."""
        if dist.get_rank() == 0:
            return {name: weight.clone() for name, weight in self.named_weights()}
        for _ in self.named_weights():
            pass
        return None


def schedule_factor(update: int, total: int, warmup_ratio: float, schedule: str) -> float:
    """Learning rate of the `update`-th (from 0) of `total` updates, as a share of the peak.

    Rises linearly over the first `warmup_ratio` of the updates, then stays, or falls to 0 along a line
    or half a cosine. No update has learning rate 0.
    """
    warmup = round(total * warmup_ratio)
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def write_pretrained(model: Any, weights: dict[str, Tensor], folder: Path, tokenizer: Any, files: Mapping[str, str] | None = None) -> None:
    """A folder that `from_pretrained` loads, complete or absent, in the place of an older one."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # classifiers need it to score a batch
    with complete_or_absent(folder) as aside, quiet():
        model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        for name, text in (files or {}).items():
            (aside / name).write_text(text, encoding="utf-8")


def _deepspeed_config(module: nn.Module, train: sections.Train, stage: int, dtype: str, accelerator: str) -> dict[str, Any]:
    sizes = [full_size(parameter) for parameter in module.parameters()]
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": accelerator == "cuda",
        "reduce_bucket_size": max(max(sizes), min(sum(sizes), REDUCE_ELEMENTS)),
    }
    zero |= offloading(accelerator, train.offload_optimizer, train.offload_parameters, train.nvme_path)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.max_grad_norm if stage else 0.0,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        # torch's fused AdamW is as fast on CPU as DeepSpeed's own, which has to be compiled first.
        "zero_force_ds_cpu_optimizer": False,
    }


def _buckets(named: list[tuple[str, nn.Parameter]], limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        nbytes = full_size(parameter) * parameter.element_size()
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    yield bucket
