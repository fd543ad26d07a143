"""How long ranks wait for one another."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist
from torch.distributed import distributed_c10d


def limit_collectives(seconds: float) -> None:
    """Every process group of this rank gives up a collective after so long. DeepSpeed clones the group it finds, and a clone waits as
    long as torch likes (half an hour), whatever the first was told."""
    if not dist.is_initialized():
        return
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def nccl_environment(seconds: float) -> dict[str, str]:
    """A rank whose collective was given up ends, so that the driver hears of it, and so does one whose watchdog hangs."""
    heartbeat = max(30, min(600, int(seconds)))
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(heartbeat),
    }
