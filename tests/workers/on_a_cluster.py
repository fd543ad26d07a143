"""Reserves device groups on a real Ray cluster of three nodes, all on this machine, and prints what came of it as JSON.

A process of its own, because a process has one Ray. The GPUs are numbers only: all that is started on them says where it is.
"""

from __future__ import annotations

import json
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

from conveyor.config import UserError, sections
from conveyor.workers.cluster import nodes_with
from conveyor.workers.placement import Placement
from conveyor.workers.rendezvous import rendezvous
from tests.workers.waiting import Worker

NODES = (8, 8, 4)
"""GPUs of each."""


def main() -> None:
    cluster = Cluster()
    for gpus in NODES:
        node = cluster.add_node(num_cpus=2, num_gpus=gpus, object_store_memory=80 * 2**20, include_dashboard=False)
        cluster.wait_for_nodes()
        _numbers[node.node_id] = len(_numbers)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = {
        "pack": layout({"rollout": 8, "train": 6}, {"rollout": 4}),
        "spread": layout({"rollout": 6}, {}, rollout="spread"),
        "strict_pack": layout({"score": 4, "train": 8}, {}, train="strict_pack", score="strict_pack"),
        "strict_spread": layout({"train": 3}, {}, train="strict_spread"),
        "engines spread, a train group together": layout({"rollout": 8, "train": 8}, {"rollout": 4}, rollout="spread", train="strict_pack"),
        "fractions": layout({"rollout": 0.5, "score": 0.25, "train": 0.25}, {}),
        "never": refused({"train": 12}, {}, 10, train="strict_pack"),
        "too much": refused({"rollout": 16, "train": 8}, {}, 10),
        "an engine": refused({"rollout": 16}, {"rollout": 16}, 10),
    }
    with Placement.create({"held": 6}, sections.Ray()):
        found["in use"] = refused({"train": 8, "rollout": 8}, {}, 1)
        found["beside"] = layout({"rollout": 8}, {}, rollout="strict_pack")
    found["workers"] = workers()
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


_numbers: dict[str, int] = {}
"""Ray's id of a node → its place in NODES."""


def layout(devices: dict[str, float], sizes: dict[str, int], **strategies: sections.Strategy) -> dict[str, list[int]]:
    settle()
    with Placement.create(devices, sections.Ray(placement=strategies), devices_per_worker=sizes) as placement:
        return nodes_of(placement)


def settle() -> None:
    """What was given back is told to the driver a moment later."""
    start = time.monotonic()
    while sum(node.free for node in nodes_with("GPU")) not in (sum(NODES), sum(NODES) - 6):
        assert time.monotonic() - start < 20
        time.sleep(0.02)


def nodes_of(placement: Placement) -> dict[str, list[int]]:
    """Group → node of each slot, as Ray says."""
    table = ray.util.placement_group_table(placement._reservation)["bundles_to_node_id"]
    return {group: [_numbers[table[slot.bundle]] for slot in slots] for group, slots in placement._slots.items()}


def refused(devices: dict[str, float], sizes: dict[str, int], timeout: float, **strategies: sections.Strategy) -> list[Any]:
    """[what is said, seconds]"""
    settle()
    start = time.monotonic()
    try:
        Placement.create(devices, sections.Ray(placement=strategies, placement_timeout=timeout), devices_per_worker=sizes).close()
    except UserError as error:
        return [str(error), time.monotonic() - start]
    raise AssertionError(f"{devices} was not refused")


class Where(Worker):
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def workers() -> dict[str, Any]:
    """Workers on slots of two nodes are where their slots are, see the GPU they were given, and meet at rank 0's."""
    with Placement.create({"train": 2}, sections.Ray(placement={"train": "strict_spread"})) as placement:
        slots = nodes_of(placement)["train"]
        started = [placement.actor(Where, "train", index, cores=()) for index in range(2)]
        asked = [ray.get(worker.node.remote(), timeout=60) for worker in started]
        visible = [ray.get(worker.where.remote(), timeout=60)[1].get("CUDA_VISIBLE_DEVICES") for worker in started]
        beside = ray.get(placement.beside_driver(Where, cores=()).node.remote(), timeout=60)
        return {
            "slots": slots,
            "workers": [_numbers[node] for node in asked],
            "visible": visible,
            "driver": _numbers[ray.get_runtime_context().get_node_id()],
            "beside the driver": _numbers[beside],
            "address": rendezvous(placement, "train")[0],
        }


if __name__ == "__main__":
    main()
