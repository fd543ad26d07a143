"""One Ray, one tiny policy and one engine for the whole test session."""

import os

# Before anything imports these libraries: no network, no usage statistics, one thread a process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from conveyor.config import sections
from tests.tiny import save_tiny_policy, save_tiny_reward_model

ENGINE_ROLLOUT = sections.Rollout(max_response_length=64, max_concurrent_requests=16)
ENGINE_SEED = 7
ENGINE_MODEL_LENGTH = 448
RAY_CORES = 12
"""More than there are: engines, kept workers and the ranks of a run share what is there."""

# How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("calm", deadline=None)
hypothesis.settings.load_profile("calm")


@pytest.fixture(scope="session", autouse=True)
def _started_ahead(request: pytest.FixtureRequest) -> None:
    """What takes long to start does so beside the tests that come first: Ray gives its workers a low priority."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in ("engine", "kept"):
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray with `RAY_CORES` logical CPUs."""
    import ray

    from conveyor.workers import cluster

    os.environ.pop("RAY_ADDRESS", None)
    cluster.set_environment(telemetry=False)
    ray.init(
        address="local", num_cpus=RAY_CORES, num_gpus=0, include_dashboard=False, object_store_memory=300 * 2**20,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="session")
def tiny_reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "reward")


@contextmanager
def rollout_engine(policy: Path, **changes: Any) -> Iterator[Any]:
    """A RolloutWorker actor that is about to start. `changes`: of its section."""
    from conveyor.workers.placement import Placement
    from tests.workers.probed import ProbedRolloutWorker

    size = changes.get("tensor_parallel_size", 1)
    with Placement.create({"rollout": size}, sections.Ray(), devices_per_worker={"rollout": size}) as placement:
        yield placement.actor(
            ProbedRolloutWorker, "rollout", 0, model=sections.Model(path=str(policy)), rollout=ENGINE_ROLLOUT.model_copy(update=changes),
            seed=ENGINE_SEED, cores=placement.cores("rollout", 0), max_model_len=ENGINE_MODEL_LENGTH,
        )  # fmt: skip


@pytest.fixture(scope="session")
def engine(ray_session: None, tiny_policy: Path) -> Iterator[Any]:
    """A RolloutWorker actor with `tiny_policy`'s weights; who installs others puts these back."""
    with rollout_engine(tiny_policy) as started:
        yield started


@pytest.fixture(scope="session")
def kept(ray_session: None) -> Iterator[Any]:
    """`KeptWorkers`: processes for the workers of a run, which have imported everything."""
    from tests.kept import KeptWorkers

    workers = KeptWorkers()
    yield workers
    workers.close()


@pytest.fixture
def restored(engine: Any, tiny_policy: Path) -> Iterator[None]:
    """Puts the shared engine's weights back after the test, and ends its stream."""
    yield
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from conveyor.workers.weight_sync import publish

    fresh = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    report = ray.get(engine.install.remote(publish(fresh.named_parameters(), 0, "actor", verify=True)), timeout=120)
    assert report.mismatched == ()
    ray.get(engine.renew.remote(), timeout=120)
