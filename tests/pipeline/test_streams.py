"""Weights from the trainer's ranks to the engines: the same runs as through the object store, and the right version for each engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conveyor.config import OnlineRecipe, UserError
from conveyor.pipeline.parity import compare
from conveyor.pipeline.streams import WeightStreams, transport_of
from conveyor.workers.reports import InstallReport, Publication, Span
from tests.pipeline.in_process import TorchEngine
from tests.pipeline.test_exactness import models, recipe, run  # noqa: F401

ANNOUNCED = Publication(3, "actor", (), None, 8, Span(0, 0), ("a place",))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(version, whether it came from the trainer itself) of each install of an engine, which compares checksums."""
    installs: list[tuple[int, bool]] = []
    load = TorchEngine._load

    def seen(self: TorchEngine, publication: Publication, weights: Any) -> InstallReport:
        installs.append((publication.version, bool(publication.layout)))
        return load(self, publication, weights)

    monkeypatch.setattr(TorchEngine, "_load", seen)
    return installs


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo, snapshots", "grpo"])
def test_a_run_is_the_same_whichever_way_weights_go(
    case: str, models: dict[str, str], tmp_path: Path, ways: list[tuple[int, bool]]  # noqa: F811
) -> None:  # fmt: skip
    settings: dict[str, Any] = {
        "ppo, snapshots": {"method": "ppo", "train": {"train_batch_size": 4}, "algorithm": {"update_epochs": 2}},
        "grpo": {"method": "grpo"},
    }[case]
    stored = run(recipe(models, tmp_path / "stored", settings, verify_sync=True), seed=1, engines=3)
    assert ways and not any(streamed for _, streamed in ways)
    ways.clear()
    streamed = run(recipe(models, tmp_path / "streamed", settings, verify_sync=True, weight_transfer="gloo"), seed=2, engines=3)
    assert compare(stored, streamed, 0.0).holds
    assert any(by_stream for _, by_stream in ways)


@pytest.mark.slow
def test_engines_that_come_late_find_the_weights_in_the_object_store(
    models: dict[str, str], tmp_path: Path, ways: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Engines drain before they install, one of them slowly, while the trainer goes on. `verify_sync` ends the run if one gets another
    version's weights."""
    begin = TorchEngine.__init__

    def sluggish(self: TorchEngine, made: OnlineRecipe, seed: int) -> None:
        begin(self, made, seed)
        if seed % 2:
            monkeypatch.setattr(self._random, "random", lambda: float(self._random.randrange(1000) > 0))

    monkeypatch.setattr(TorchEngine, "__init__", sluggish)
    late = {"micro_batch_size": 2, "order": "completion", "max_staleness": 2, "in_flight_update": False, "verify_sync": True}
    train = {"rollout_batch_size": 2, "train_batch_size": 2, "steps": 6}
    settings = {"method": "grpo", "train": train, "rollout": {"max_concurrent_requests": 2}, "pipeline": {"weight_transfer": "gloo"}}
    run(recipe(models, tmp_path / "run", settings, **late), engines=2)
    assert {streamed for _, streamed in ways} == {True, False}


class Rank:
    """What is asked of a train worker, in order."""

    def __init__(self, log: list[Any], number: int) -> None:
        self._log, self._number = log, number

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self._log.append((name, self._number, *arguments))
            found = {"stream_door": ("here", 40 + self._number), "install": InstallReport(3, 8, Span(0, 0))}
            return asyncio.ensure_future(asyncio.sleep(0, found.get(name)))

        return type("Method", (), {"remote": staticmethod(remote)})


def test_ranks_share_the_engines_and_one_pass_serves_those_that_ask_together() -> None:
    log: list[Any] = []

    async def story() -> None:
        streams = WeightStreams([Rank(log, r) for r in range(2)], [Rank(log, e) for e in range(3)])
        await streams.open("gloo", 4)
        met = [(rank, engine) for name, rank, *rest in log if name == "open_stream" and len(rest) == 5 for engine in rest[1:2]]
        assert sorted(met) == [(0, 0), (0, 2), (1, 1)]
        assert {rest[-1] for name, _, *rest in log if name == "open_stream"} == {5}
        log.clear()
        streams.announce(ANNOUNCED)
        await asyncio.gather(streams.install(0, ANNOUNCED), streams.install(2, ANNOUNCED))
        assert [entry for entry in log if entry[0] == "send_weights"] == [("send_weights", r, 3, (0, 2)) for r in range(2)]
        log.clear()
        asked = asyncio.ensure_future(streams.install(1, ANNOUNCED))
        await asyncio.sleep(0)  # it has asked, and its pass has not begun
        assert [name for name, *_ in log] == ["install"]
        assert streams.late() is None, "all engines are served"
        assert log[1:] == [("send_weights", r, 3, (1,)) for r in range(2)], "before the update that follows"
        await asked
        streams.announce(ANNOUNCED)
        await streams.install(1, ANNOUNCED)
        assert streams.late() is ANNOUNCED and streams.late() is None
        with pytest.raises(AssertionError, match="not announced any more"):
            await streams.install(0, ANNOUNCED)

    asyncio.run(story())


def test_which_way_weights_go(models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    def way(devices: Any, roles: dict[str, str], **pipeline: Any) -> str | None:
        return transport_of(recipe(models, tmp_path, {"method": "grpo", "roles": roles}, **pipeline), devices)

    assert way("GPU", {}) == "nccl"
    assert way("GPU", {"rollout": "train"}) is None
    assert way("GPU", {"score": "train"}) is None, "the actor sleeps between its turns"
    assert way("CPU", {}) is None
    assert way("CPU", {}, weight_transfer="gloo") == "gloo"
    assert way("GPU", {}, weight_transfer="object_store") is None
    # The trainer leaves its devices to the reference, and may do so before every engine has asked for the weights.
    assert way("GPU", {"reference": "train"}) is None
    assert way("GPU", {"reference": "train"}, sleep=False) == "nccl"
    with pytest.raises(UserError, match=r"gloo: the trainer shares its devices and may be asleep"):
        way("GPU", {"reference": "train"}, weight_transfer="gloo")
    with pytest.raises(UserError, match=r"weight_transfer: the actor sleeps between its turns on train"):
        way("CPU", {"reference": "train"}, weight_transfer="gloo", sleep=True)
    with pytest.raises(UserError, match="nccl moves weights between GPUs"):
        way("CPU", {}, weight_transfer="nccl")
