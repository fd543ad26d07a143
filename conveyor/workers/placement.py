"""Device groups on a Ray cluster: which worker runs on which accelerator, or core.

A group of n devices has n slots, each a bundle of one placement group, which is reserved as a
whole or not at all. A group of less than one device has one slot, on a device it shares with
other such groups. Several workers may share a slot: that is how roles are merged onto a group.
"""

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

    def __str__(self) -> str:
        noun = "GPU" if self.kind == "GPU" else "CPU core"
        return f"{self.count:g} {noun}{'' if self.count == 1 else 's'}"


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
    return Devices("GPU", has["GPU"]) if has.get("GPU") else Devices("CPU", has.get("CPU", 0))


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
    devices: Mapping[str, float], there: Devices, devices_per_worker: Mapping[str, int] | None = None
) -> list[tuple[str, float]]:
    """(group, devices) of every slot that the groups would have.

    Raises:
        UserError: more is asked for than there is, or a group cannot be cut into slots.
    """
    total = sum(devices.values())
    if total > there.count + 1e-6:
        raise UserError(f"devices: asked for {_asked(devices, total, there)}, the cluster has {there}")
    sizes = {group: (devices_per_worker or {}).get(group, 1) for group in devices}
    return [(group, amount) for group, total in devices.items() for amount in _split(group, total, sizes[group])]


@dataclass(frozen=True, slots=True)
class _Slot:
    bundle: int
    amount: float
    """Devices of the bundle."""
    cores: tuple[int, ...] | None
    """None: the devices are GPUs."""


@dataclass
class Placement:
    """The reserved device groups. Make one with `create`; `close` it."""

    kind: Literal["GPU", "CPU"]
    devices: Mapping[str, float]
    _reservation: Any
    _slots: dict[str, list[_Slot]]
    _environment: dict[str, str]
    _started_ray: bool
    _actors: list[Any] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        devices: Mapping[str, float],
        ray_section: sections.Ray,
        *,
        telemetry: bool = False,
        devices_per_worker: Mapping[str, int] | None = None,
        store_gib: float = SMALLEST_STORE_GIB,
    ) -> Placement:
        """Join or start Ray and reserve the groups.

        Args:
            devices: group → devices; fractions below one share a device.
            devices_per_worker: group → devices of one slot (an engine's tensor parallel size), default 1.
            store_gib: see `connect`.

        Raises:
            UserError: more is asked for than the cluster has (said before Ray is started), or what
                it has is not free within `placement_timeout`; names both.
        """
        import ray

        there = available(ray_section)
        owners = check_devices(devices, there, devices_per_worker)
        amounts = [amount for _, amount in owners]
        started = connect(ray_section, telemetry, store_gib)
        try:
            reservation = _reserve(devices, amounts, there, ray_section.placement_timeout)
        except BaseException:
            if started:
                ray.shutdown()
            raise
        cores = _assign_cores(reservation, amounts) if there.kind == "CPU" else [None] * len(amounts)
        slots: dict[str, list[_Slot]] = {group: [] for group in devices}
        for index, (group, amount) in enumerate(owners):
            slots[group].append(_Slot(index, amount, cores[index]))
        environment = {name: values[telemetry] for name, values in USAGE_STATISTICS.items()}
        return cls(there.kind, dict(devices), reservation, slots, environment, started)

    def slots(self, group: str) -> int:
        """How many workers of one kind fit the group, each on its own device(s)."""
        return len(self._slots[group])

    def cores(self, group: str, index: int) -> tuple[int, ...] | None:
        """Core ids a worker in that slot pins to; None where the devices are GPUs. Distinct for
        whole devices of a node (as long as the node has that many cores), shared by fractions."""
        return self._slots[group][index].cores

    def actor(
        self,
        cls: type,
        group: str,
        index: int,
        *,
        share: float = 1.0,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        concurrency: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start a Ray actor of a plain class; returns its handle at once.

        Args:
            index: slot of the group.
            share: part of the slot it takes; the shares of a slot's workers may not pass 1.
            env: further environment variables of its process.
            concurrency: method calls that may run at once, in threads; default: the class's own
                `max_concurrency`, else 1. Methods of a group in the class's `concurrency_groups` have threads of their own.
            kwargs: of its constructor.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slot = self._slots[group][index]
        # Ray counts in 1/10000; rounding up would make three thirds more than one.
        amount = math.floor(slot.amount * share * 10_000) / 10_000
        environment = self._environment | _thread_environment(slot.cores) | dict(env or {})
        options: dict[str, Any] = dict(
            num_cpus=amount if self.kind == "CPU" else 0,
            num_gpus=amount if self.kind == "GPU" else 0,
            max_concurrency=concurrency or getattr(cls, "max_concurrency", 1),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reservation, placement_group_bundle_index=slot.bundle),
            runtime_env={"env_vars": environment},
        )
        if name is not None:
            options["name"] = name
        if options["max_concurrency"] == 1:
            # In the order they were sent, which the train line relies on. It is Ray's default, also with concurrency groups.
            options["allow_out_of_order_execution"] = False
        groups: Any = {"concurrency_groups": cls.concurrency_groups} if hasattr(cls, "concurrency_groups") else {}
        remote: Any = ray.remote(**groups)(cls) if groups else ray.remote(cls)
        actor = remote.options(**options).remote(**kwargs)
        self._actors.append(actor)
        return actor

    def beside_driver(self, cls: type, **kwargs: Any) -> Any:
        """Start a Ray actor that needs no device, on the driver's node; returns its handle at once. `kwargs`: of its constructor."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = (
            ray.remote(cls)
            .options(
                num_cpus=0,
                max_concurrency=getattr(cls, "max_concurrency", 1),
                scheduling_strategy=here,
                runtime_env={"env_vars": self._environment | _thread_environment((0,))},
            )
            .remote(**kwargs)
        )
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """End the workers, free the devices and, where it was started here, Ray."""
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            remove_placement_group(self._reservation)
            if self._started_ray:
                ray.shutdown()
        self._actors.clear()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(group: str, total: float, size: int) -> list[float]:
    """Amounts of a group's bundles: `size` devices each; less than one device is one bundle."""
    if total < 1 and size == 1:
        return [total]
    if total != int(total) or total % size:
        what = "a whole number, or less than 1" if size == 1 else f"a multiple of the {size} devices of one worker"
        raise UserError(f"devices.{group}: {total:g}: must be {what}")
    return [float(size)] * (int(total) // size)


def _reserve(devices: Mapping[str, float], amounts: list[float], there: Devices, timeout: float) -> Any:
    import ray
    from ray.util import placement_group, remove_placement_group

    reservation = placement_group([{there.kind: amount} for amount in amounts], strategy="PACK")
    if reservation.wait(timeout):
        return reservation
    free = ray.available_resources().get(there.kind, 0)
    remove_placement_group(reservation)
    asked = _asked(devices, sum(amounts), there)
    raise UserError(f"devices: no room for {asked} within {timeout:g} s: the cluster has {there}, of which {free:g} are free")


def _assign_cores(reservation: Any, amounts: list[float]) -> list[tuple[int, ...]]:
    """Core ids for each bundle: whole devices take the next cores of their node, fractions fill
    up a core together. Begins anew where Ray counts more cores than the node has."""
    from ray.util import placement_group_table

    nodes = placement_group_table(reservation)["bundles_to_node_id"]
    has = {node: _cores_of(node) for node in set(nodes.values())}
    taken = dict.fromkeys(has, 0)
    shared: dict[str, tuple[int, float]] = {}
    assigned = []
    for index, amount in enumerate(amounts):
        node = nodes[index]
        core, filled = shared.get(node, (0, 1.0))
        if amount < 1 and filled + amount <= 1 + 1e-6:
            shared[node] = (core, filled + amount)
            places = [core]
        else:
            places = list(range(taken[node], taken[node] + math.ceil(amount)))
            taken[node] += len(places)
            if amount < 1:
                shared[node] = (places[0], amount)
        assigned.append(tuple(sorted({has[node][place % len(has[node])] for place in places})))
    return assigned


def _cores_of(node: str) -> list[int]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node == ray.get_runtime_context().get_node_id():
        return sorted(os.sched_getaffinity(0))
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    affinity: Any = ray.remote(os.sched_getaffinity)
    return sorted(ray.get(affinity.options(num_cpus=0, scheduling_strategy=there).remote(0)))


def _thread_environment(cores: tuple[int, ...] | None) -> dict[str, str]:
    """Libraries read their number of threads once, when they are loaded."""
    if cores is None:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(len(cores)))


def _asked(devices: Mapping[str, float], total: float, there: Devices) -> str:
    groups = ", ".join(f"{group}: {amount:g}" for group, amount in devices.items())
    return f"{Devices(there.kind, total)} ({groups})"
