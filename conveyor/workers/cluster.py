"""The Ray cluster: joined or started, what devices it has, and how a recipe's device groups are cut from them."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from conveyor import USAGE_STATISTICS
from conveyor.config import OfflineRecipe, OnlineRecipe, UserError, sections
from conveyor.workers.nodes import Node, listed, strategies, unfit

REACH_SECONDS = 5
"""For a first connection to a cluster."""
MAX_DEFAULT_CORES = 4
"""Cores taken on a machine without GPUs when the recipe names no devices: each is a process with
a model of its own, so all of a large server would be far more than small models can use."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What a cluster has to offer: its GPUs, or its CPU cores where it has none."""

    kind: Literal["GPU", "CPU"]
    count: float
    nodes: tuple[Node, ...] = field(default=(), compare=False)
    """Those that have some; none are named where Ray has not been started: there is this machine."""

    @property
    def noun(self) -> str:
        return "GPU" if self.kind == "GPU" else "CPU core"

    def __str__(self) -> str:
        return f"{self.count:g} {self.noun}{'' if self.count == 1 else 's'}"


SMALLEST_STORE_GIB = 0.5


def connect(ray_section: sections.Ray, telemetry: bool = False, store_gib: float = SMALLEST_STORE_GIB) -> bool:
    """Join the cluster at `address` or RAY_ADDRESS, or start a local Ray.

    Args:
        store_gib: object store of a local Ray without GPUs, where the recipe does not say.

    Returns:
        True where a local Ray was started, which the caller then has to shut down.

    Raises:
        UserError: no cluster answers at the address.
    """
    set_environment(telemetry)
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR")
    address = ray_section.address or os.environ.get("RAY_ADDRESS")
    if address:
        key = "ray.address" if ray_section.address else "RAY_ADDRESS"
        _check_reachable(key, address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            # Ray sends its token to no address named by hand unless told to, so neither do we.
            hint = "if it uses token authentication, set RAY_AUTH_MODE=token and give this machine its token"
            raise UserError(f"{key}: could not join a Ray cluster at {address} ({str(error).splitlines()[0]}); {hint}") from None
        return False
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    gib = ray_section.object_store_gib or (None if gpus else store_gib)
    store = None if gib is None else int(gib * 2**30)
    ray.init(address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, object_store_memory=store, **quiet)
    return True


def _check_reachable(key: str, address: str) -> None:
    """Ray retries an address where nothing listens for minutes; a connection tells in seconds."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # a name such as `auto`, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"{key}: nothing answers at {address} ({error})") from None


def set_environment(telemetry: bool) -> None:
    """Ray's switches that are read when it is imported or started."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = USAGE_STATISTICS["RAY_USAGE_STATS_ENABLED"][telemetry]
    # Workers run in this interpreter's environment, also under `uv run`, and see their GPUs as Ray gives them.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def available(ray_section: sections.Ray) -> Devices:
    """The devices, used or not, of the cluster that `connect` would give: of this machine, without
    starting Ray, where it would start a local one."""
    import ray

    if not ray.is_initialized():
        if not (ray_section.address or os.environ.get("RAY_ADDRESS")):
            gpus = torch.cuda.device_count()
            return Devices("GPU", gpus) if gpus else Devices("CPU", len(os.sched_getaffinity(0)))
        connect(ray_section)
    has = ray.cluster_resources()
    kind: Literal["GPU", "CPU"] = "GPU" if has.get("GPU") else "CPU"
    return Devices(kind, has.get(kind, 0), nodes_with(kind))


def nodes_with(kind: Literal["GPU", "CPU"]) -> tuple[Node, ...]:
    """The cluster's living nodes that have devices of this kind, the driver's first, with what is free of them now."""
    import ray
    from ray._private.state import available_resources_per_node

    free, here = available_resources_per_node(), ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind)]
    return tuple(
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"][kind], free.get(node["NodeID"], {}).get(kind, 0.0))
        for node in sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"]))
    )


def default_devices(recipe: OnlineRecipe | OfflineRecipe, there: Devices | None = None) -> dict[str, float]:
    """Device groups for a recipe without `devices:`, from what is there (default: `available()`).

    With fewer devices than groups, the first groups (rollout, then the actor's) get one each and
    the rest share the last device. With more, every second further one goes to rollout.
    """
    there = there or available(recipe.ray)
    count = int(there.count) if there.kind == "GPU" else min(int(there.count), MAX_DEFAULT_CORES)
    if isinstance(recipe, OfflineRecipe):
        return {"train": max(count, 1)}
    roles = ("rollout", "actor", *recipe.placed_roles)
    groups = list(dict.fromkeys(recipe.role_group(role) for role in roles))
    if count < len(groups):
        whole = groups[: max(count - 1, 0)]
        share = math.floor(100 / (len(groups) - len(whole))) / 100
        return {group: 1 if group in whole else share for group in groups}
    split: dict[str, float] = dict.fromkeys(groups, 1)
    for _ in range(count - len(groups)):
        # Highest averages (D'Hondt), rollout weighing twice: sampling is the longest stage.
        split[max(groups, key=lambda group: ((2 if group == groups[0] else 1) / (split[group] + 1), group != groups[0]))] += 1
    return split


def check_devices(
    devices: Mapping[str, float],
    there: Devices,
    devices_per_worker: Mapping[str, int] | None = None,
    placement: Mapping[str, sections.Strategy] | None = None,
) -> dict[str, list[float]]:
    """Group → devices of every slot that it would have.

    Raises:
        UserError: more is asked for than there is, a group cannot be cut into slots, or these fit on no nodes like the cluster's.
    """
    total = sum(devices.values())
    if total > there.count + 1e-6:
        by_node = f" ({listed(there.nodes)})" if len(there.nodes) > 1 else ""
        raise UserError(f"devices: asked for {asked(devices, total, there)}, the cluster has {there}{by_node}")
    sizes = {group: (devices_per_worker or {}).get(group, 1) for group in devices}
    slots = {group: _split(group, total, sizes[group]) for group, total in devices.items()}
    nodes = there.nodes or (Node("", "this machine", there.count, there.count),)
    reason = unfit(strategies(slots, placement or {}), nodes, f"{there.noun}s")
    if reason is not None:
        raise UserError(reason)
    return slots


def _split(group: str, total: float, size: int) -> list[float]:
    """Amounts of a group's bundles: `size` devices each; less than one device is one bundle."""
    if total < 1 and size == 1:
        return [total]
    if total != int(total) or total % size:
        what = "a whole number, or less than 1" if size == 1 else f"a multiple of the {size} devices of one worker"
        raise UserError(f"devices.{group}: {total:g}: must be {what}")
    return [float(size)] * (int(total) // size)


def asked(devices: Mapping[str, float], total: float, there: Devices) -> str:
    """`3 GPUs (rollout: 2, train: 1)`"""
    groups = ", ".join(f"{group}: {amount:g}" for group, amount in devices.items())
    return f"{Devices(there.kind, total)} ({groups})"
