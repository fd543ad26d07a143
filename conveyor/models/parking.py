"""Device memory that waits in host memory, and comes back bit for bit.

What is moved are storages, not tensors: a storage's bytes are copied to the host and its device memory is given back, while every
tensor that looks into it stays as it is. So flat buffers, their views, masters, Adam's moments and gradients of every ZeRO stage
move alike, without a word to DeepSpeed, whose own `offload_states` knows stage 3 only.

    park ──▶ nothing may use the tensors ──▶ unpark

Nothing but the tensors of the given objects is moved. A CUDA context and NCCL's buffers stay on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WALKED = ("deepspeed", "conveyor", "bitsandbytes", "peft")
"""Packages whose objects may hold tensors in their attributes."""


class Parking:
    """The device memory of some objects. Legal order: `park`, `unpark`, `park`, …"""

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        """(storage, its bytes on the host)"""
        self._host: dict[int, Tensor] = {}
        """Host memory of the last time, by storage: pinning it takes longer than the copy."""
        self.asleep = False

    def park(self, *roots: Any) -> int:
        """Move the tensors of `roots` (modules, engines, optimizers) to host memory; returns the bytes that the device has back."""
        assert not self.asleep, "parked already"
        cuda = torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
        storages = {storage._cdata: storage for tensor in tensors_of(roots) if _is_movable(storage := tensor.untyped_storage())}
        self._parked = [(storage, self._copied(key, storage)) for key, storage in storages.items()]
        if cuda:
            torch.cuda.synchronize()
        for storage, _ in self._parked:
            storage.resize_(0)
        self._host = {storage._cdata: host for storage, host in self._parked}
        self.asleep = True
        if cuda:
            torch.cuda.empty_cache()
        return sum(host.numel() for _, host in self._parked)

    def unpark(self) -> int:
        """Bring everything back; returns its bytes."""
        assert self.asleep, "not parked"
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=host.is_pinned())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        moved = sum(host.numel() for _, host in self._parked)
        self._parked, self.asleep = [], False
        return moved

    def _copied(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host, pin = self._host.get(key), storage.device.type == "cuda"
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return host.copy_(_bytes_of(storage), non_blocking=pin)


def _is_movable(storage: torch.UntypedStorage) -> bool:
    """Memory that is mapped from a file, or shared with another process, is not this process's to give back."""
    if storage.device.type == "cpu" and torch.cuda.is_available():
        return False  # offloaded already
    return storage.device.type in ("cuda", "cpu") and storage.nbytes() > 0 and storage.resizable()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_of(roots: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from the roots: through containers, modules, optimizers, the objects of `WALKED`,
    gradients and attributes of tensors (ZeRO-3 keeps a parameter's part there)."""
    seen: dict[int, Any] = {}  # holds them: a gradient's Python object may live no longer than the look at it
    waiting: deque[Any] = deque([roots])
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
            waiting += [value.grad] if value.is_leaf and value.grad is not None else []
            waiting.extend(value.__dict__.values())
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
            waiting.extend(value.keys())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting.extend(value)
        elif isinstance(value, nn.Module | torch.optim.Optimizer) or type(value).__module__.partition(".")[0] in WALKED:
            waiting.extend(getattr(value, "__dict__", {}).values())
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting.extend(getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name))
