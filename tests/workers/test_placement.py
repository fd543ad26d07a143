import json
import os
import re
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from conveyor.config import UserError, parse_recipe, sections
from conveyor.workers.cluster import Devices, available, check_devices, connect, default_devices
from conveyor.workers.placement import Placement
from tests.conftest import RAY_CORES
from tests.workers.waiting import Worker


def recipe(method: str = "ppo", **changes: Any) -> Any:
    raw = {
        "method": method,
        "output_dir": "out",
        "model": {"path": "policy"},
        "data": {"path": "prompts.jsonl"},
        "rewards": [{"name": "exact", "function": "reward.py:exact"}],
    }
    return parse_recipe(raw | changes)


@pytest.mark.parametrize(
    ("there", "right"),
    [
        (Devices("CPU", 1), {"rollout": 0.33, "train": 0.33, "score": 0.33}),
        (Devices("CPU", 2), {"rollout": 1, "train": 0.5, "score": 0.5}),
        (Devices("CPU", 3), {"rollout": 1, "train": 1, "score": 1}),
        (Devices("CPU", 64), {"rollout": 2, "train": 1, "score": 1}),
        (Devices("GPU", 1), {"rollout": 0.33, "train": 0.33, "score": 0.33}),
        (Devices("GPU", 8), {"rollout": 4, "train": 2, "score": 2}),
    ],
)
def test_default_devices(there: Devices, right: dict[str, float]) -> None:
    assert default_devices(recipe(), there) == right


@pytest.mark.parametrize("count", range(1, 40))
def test_default_devices_never_ask_for_more_than_there_is(count: int) -> None:
    for roles in (
        {},
        {"critic": "critic"},
        {"critic": "critic", "reference": "frozen"},
        {"score": "all", "actor": "all", "rollout": "all"},
    ):
        devices = default_devices(recipe(roles=roles), Devices("GPU", count))
        assert sum(devices.values()) <= count
        assert all(amount > 0 for amount in devices.values())
        if count >= len(devices):
            assert sum(devices.values()) == count
        parse_recipe(recipe(roles=roles).model_dump() | {"devices": devices})


def test_default_devices_offline() -> None:
    raw = {"method": "sft", "output_dir": "out", "model": {"path": "policy"}, "data": {"path": "rows.jsonl"}}
    assert default_devices(parse_recipe(raw), Devices("GPU", 8)) == {"train": 8}


def test_fractions_above_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"devices\.train: 1\.5: must be a whole number, or less than 1"):
        Placement.create({"train": 1.5}, sections.Ray())
    with pytest.raises(UserError, match=r"devices\.rollout: 3: must be a multiple of the 2 devices of one worker"):
        check_devices({"rollout": 3}, Devices("GPU", 8), {"rollout": 2})


def test_an_address_where_nothing_listens_is_told_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"ray\.address: nothing answers at {address}"):
        connect(sections.Ray(address=address))
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_over_asking_names_asked_and_available(ray_session: None) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        Placement.create({"rollout": 6, "score": 5, "train": 2}, sections.Ray())
    assert str(error.value) == "devices: asked for 13 CPU cores (rollout: 6, score: 5, train: 2), the cluster has 12 CPU cores"
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_devices_in_use_are_waited_for_only_so_long(ray_session: None) -> None:
    with Placement.create({"rollout": 5}, sections.Ray()):
        start = time.monotonic()
        with pytest.raises(
            UserError, match=r"no room for 10 CPU cores \(train: 10\) within 1 s: the cluster has 12 CPU cores, of which \d are free"
        ):
            Placement.create({"train": 10}, sections.Ray(placement_timeout=1))
        assert time.monotonic() - start < 10


@pytest.mark.slow
def test_workers_start_on_their_slots(ray_session: None) -> None:
    import ray

    assert available(sections.Ray()) == Devices("CPU", RAY_CORES)
    with Placement.create({"rollout": 2, "score": 0.5, "train": 0.5}, sections.Ray()) as placement:
        assert {group: placement.slots(group) for group in placement.devices} == {"rollout": 2, "score": 1, "train": 1}
        slots = [("rollout", 0), ("rollout", 1), ("score", 0), ("train", 0)]
        cores = [placement.cores(group, index) for group, index in slots]
        assert cores[2] == cores[3]
        if len(os.sched_getaffinity(0)) >= 3:
            assert len(set(cores)) == 3
        first = placement.actor(Worker, "rollout", 0, share=1 / 3, cores=cores[0], env={"MARK": "1"})
        beside = [placement.actor(Worker, "rollout", 0, share=1 / 3, cores=cores[0]) for _ in range(2)]
        shared = placement.actor(Worker, "train", 0, cores=cores[3])
        first.wait.remote()  # two calls run at once, as the class says
        seen = ray.get([worker.where.remote() for worker in (first, *beside, shared)], timeout=60)
        assert [place for place, _, _ in seen] == [cores[0], cores[0], cores[0], cores[3]]
        assert seen[0][1]["MARK"] == "1"
        assert "MARK" not in seen[1][1]
        assert all(environment["OMP_NUM_THREADS"] == "1" for _, environment, _ in seen)
        assert all(environment["VLLM_NO_USAGE_STATS"] == "1" for _, environment, _ in seen)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(shared.where.remote(), timeout=30)
    assert ray.is_initialized()  # it was not started by the placement


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_of_several_nodes() -> None:
    """Three nodes of 8, 8 and 4 GPUs that are numbers only, on this machine; in a process of its own, for a process has one Ray."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.workers.on_a_cluster"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pack"] == {"rollout": [0, 0], "train": [1] * 6}
    spread = found["spread"]["rollout"]  # freed devices are told late, so nodes may come in another order
    assert sorted(spread) == [0, 0, 1, 1, 2, 2] and spread[::2] == spread[1::2]
    assert found["strict_pack"] == {"score": [2] * 4, "train": [0] * 8}
    assert found["strict_spread"] == {"train": [0, 1, 2]}
    together = found["engines spread, a train group together"]
    assert len(set(together["train"])) == 1 and len({*together["rollout"], together["train"][0]}) == 3
    assert found["fractions"] == {"rollout": [2], "score": [2], "train": [2]}
    assert found["beside"]["rollout"] in ([0] * 8, [1] * 8)  # whichever the other reservation left whole
    for case, said in {
        "never": r"ray\.placement\.train: strict_pack needs 12 GPUs on one node; the largest, [\d.]+, has 8",
        "too much": r"devices: asked for 24 GPUs \(rollout: 16, train: 8\), the cluster has 20 GPUs \(2 nodes have 8, [\d.]+ has 4\)",
        "an engine": r"devices\.rollout: one worker needs 16 GPUs of one node; the largest, [\d.]+, has 8",
        "in use": r"no room for 16 GPUs .* the cluster has 20 GPUs, of which 14 are free .*has 2 of (8|4) free.*; asked for train: 8 × 1",
    }.items():
        text, seconds = found[case]
        assert re.search(said, text), text
        assert seconds < 10
    workers = found["workers"]
    assert workers["workers"] == workers["slots"] == [0, 2]
    assert workers["visible"] == ["0", "0"]
    assert workers["beside the driver"] == workers["driver"]
    assert re.fullmatch(r"[\d.]+", workers["address"])
