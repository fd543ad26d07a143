"""Calls that are not answered, or badly: who is blamed, in which words, and how soon."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError

from conveyor.config import RunError, UserError
from conveyor.pipeline import asking
from conveyor.pipeline.asking import Asking
from conveyor.workers.failures import Who, WorkerDied

GLOO = "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300ms for recv operation to complete"
LEFT = "; go on from runs/a/checkpoints/step_2 with checkpoint.resume"


@pytest.fixture(autouse=True)
def _listens_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LISTEN_SECONDS", 0.2)


async def after(seconds: float, value: Any = None) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


def ask(*answers: Awaitable[Any], timeout: float = 0.3, stage: str = "train") -> list[Any]:
    async def go() -> list[Any]:
        ranks = [(Who(stage, "train", rank), answer) for rank, answer in enumerate(answers)]
        return await Asking(timeout, lambda: LEFT).all(ranks, "forward_backward")

    return asyncio.run(go())


def said(*answers: Awaitable[Any], **how: Any) -> str:
    with pytest.raises(RunError) as error:
        ask(*answers, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


NEVER = 60


def test_answers_come_in_the_order_asked() -> None:
    assert ask(after(0.05, "a"), after(0, "b")) == ["a", "b"]


def test_a_rank_that_hangs_is_named_though_the_others_are_heard_first() -> None:
    start = time.monotonic()
    line = said(after(NEVER), after(0.25, RuntimeError(GLOO)), after(0.25, RuntimeError(GLOO)))
    assert line == (
        "train rank 0 of group train has not finished forward_backward within 0.3 s (ray.timeout); train rank 1 of group train, "
        "train rank 2 of group train waited in vain" + LEFT
    )
    assert time.monotonic() - start < 1
    # With NCCL the ranks that waited end their processes.
    line = said(after(NEVER), after(0.31, RayActorError()))
    assert line.startswith("train rank 0 of group train has not finished forward_backward within 0.3 s (ray.timeout); train rank 1 of")


def test_time_is_up_for_all_that_say_nothing() -> None:
    both = "train rank 0 of group train, train rank 1 of group train have not finished forward_backward within 0.3 s (ray.timeout)"
    assert said(after(NEVER), after(NEVER)) == both + LEFT
    one = "rollout engine 0 has not finished forward_backward within 0.3 s (ray.timeout)"
    assert said(after(NEVER), stage="rollout") == one + LEFT


def test_the_rank_that_failed_is_blamed_not_those_that_lost_it() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error [10.0.0.1]: Connection closed by peer")
    died = "train rank 1 of group train died, killed or out of memory"
    assert said(after(0, lost), after(0.05, RayActorError()), timeout=5) == died + LEFT
    with pytest.raises(ZeroDivisionError):  # a fault of the program comes as it is
        ask(after(0, lost), after(0.05, ZeroDivisionError()), timeout=5)
    with pytest.raises(UserError, match="no such column"):
        ask(after(0, lost), after(0.05, UserError("no such column")), timeout=5)
    assert said(after(0, lost), after(0, lost)).startswith("the ranks of group train lost one another in forward_backward ([gloo")


def test_a_death_is_told_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerDied):
        ask(after(0, RayActorError()), after(NEVER), timeout=30)
    assert time.monotonic() - start < 0.15


@pytest.mark.parametrize(
    ("stage", "who", "setting"),
    [
        ("train", "train rank 1 of group train", "train.max_tokens_per_micro_batch or pipeline.micro_batch_size, or set model.gradient"),
        ("score", "score worker 1 of group train", "pipeline.micro_batch_size"),
        ("rollout", "rollout engine 1", "rollout.gpu_memory_utilization or rollout.max_concurrent_requests"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("the rollout engine failed: OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')"),
    ],
)
def test_out_of_memory_names_the_worker_the_setting_and_the_checkpoint(stage: str, who: str, setting: str, error: Exception) -> None:
    line = said(after(NEVER, 0), after(0, error), stage=stage, timeout=5)
    assert line.startswith(f"{who} is out of memory (") and f"); lower {setting}" in line and line.endswith(LEFT)


def test_a_node_without_memory() -> None:
    line = said(after(0, OutOfMemoryError("Task was killed due to the node running low on memory.")))
    assert line.startswith("train rank 0 of group train was ended by Ray, because its node has no memory left; put fewer workers on a node")


def test_the_time_of_a_call_begins_when_the_one_before_it_is_answered() -> None:
    """A rank has one task and the next is sent already: both take 0.2 s, and each may take 0.3 s."""

    async def go() -> list[Any]:
        watched, rank = Asking(0.3), Who("train", "train", 0)
        return await asyncio.gather(watched.one(rank, "a", after(0.2, 1)), watched.one(rank, "b", after(0.4, 2)))

    assert asyncio.run(go()) == [1, 2]
