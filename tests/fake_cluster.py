"""`python -m tests.fake_cluster RECIPE OUT`: `conveyor check` on a Ray cluster of four nodes that say they have eight GPUs each."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from conveyor.cli import main


def said(*arguments: str) -> dict[str, Any]:
    out, err, start = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.monotonic() - start}


if __name__ == "__main__":
    recipe, out = sys.argv[1:]
    small: dict[str, Any] = {"num_cpus": 1, "num_gpus": 8, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        for _ in range(3):
            cluster.add_node(wait=False, **{key: value for key, value in small.items() if key != "include_dashboard"})
        cluster.wait_for_nodes()
        joined = ("check", recipe, "--cluster", "ray", "--ray.address", cluster.address)
        found = [said(*joined), said(*joined, "--devices.train", "32")]
        Path(out).write_text(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()
