"""Device groups on a Ray cluster: which worker runs on which accelerator, or core.

A group of n devices has n slots, each a bundle of one placement group, which is reserved as a
whole or not at all. Which node a bundle goes to is decided here (`nodes.py`), and the bundle asks
for that node. A group of less than one device has one slot, on a device it shares with other
such groups. Several workers may share a slot: that is how roles are merged onto a group.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conveyor import USAGE_STATISTICS
from conveyor.config import UserError, sections
from conveyor.workers.cluster import SMALLEST_STORE_GIB, Devices, asked, available, check_devices, connect, nodes_with
from conveyor.workers.nodes import assign, describe, listed, strategies

RESERVE_SECONDS = 2.0
"""For Ray to reserve bundles on nodes that had room a moment ago; then what is free is looked at anew."""
LOOK_SECONDS = 0.2
"""Between looks at what is free."""


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
            UserError: more is asked for than the cluster has (said before Ray is started), no nodes like its can hold
                the groups, or what it has is not free within `placement_timeout`; says what was asked and what there is.
        """
        import ray

        there = available(ray_section)
        sizes = check_devices(devices, there, devices_per_worker, ray_section.placement)
        owners = [(group, amount) for group, amounts in sizes.items() for amount in amounts]
        amounts = [amount for _, amount in owners]
        started = connect(ray_section, telemetry, store_gib)
        try:
            reservation = _reserve(devices, sizes, there, ray_section)
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


def _reserve(devices: Mapping[str, float], sizes: Mapping[str, list[float]], there: Devices, ray_section: sections.Ray) -> Any:
    """A placement group with a bundle a slot, each on the node that was chosen for it. Others may take what is free in the meantime,
    so nodes are chosen anew until there is room, or the time is up."""
    from ray.util import placement_group, remove_placement_group

    wanted, deadline = strategies(sizes, ray_section.placement), time.monotonic() + ray_section.placement_timeout
    bundles = [{there.kind: amount} for amounts in sizes.values() for amount in amounts]
    while True:
        nodes = nodes_with(there.kind)
        places = assign(wanted, nodes)
        if places is not None:
            labels = [{"ray.io/node-id": node} for group in sizes for node in places[group]]
            reservation = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
            if reservation.wait(max(0.1, min(RESERVE_SECONDS, deadline - time.monotonic()))):
                return reservation
            remove_placement_group(reservation)
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOK_SECONDS)
    free = sum(node.free for node in nodes)
    text = f"devices: no room for {asked(devices, sum(devices.values()), there)} within {ray_section.placement_timeout:g} s"
    by_node = f" ({listed(nodes, free=True)}; asked for {describe(wanted)})" if len(nodes) > 1 else ""
    raise UserError(f"{text}: the cluster has {there}, of which {free:g} are free{by_node}")


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
    affinity: Any = ray.remote(_own_cores)
    return sorted(ray.get(affinity.options(num_cpus=0, scheduling_strategy=there).remote()))


def _own_cores() -> set[int]:
    return os.sched_getaffinity(0)


def _thread_environment(cores: tuple[int, ...] | None) -> dict[str, str]:
    """Libraries read their number of threads once, when they are loaded."""
    if cores is None:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(len(cores)))
