"""The executor on actors that answer at once: what goes where, and that failures end the run."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError

from conveyor.algorithms.metrics import Mean
from conveyor.config import OnlineRecipe, RunError, parse_recipe
from conveyor.data.prompts import PromptOrder
from conveyor.pipeline.executor import Executor, SyncError
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, SampleId
from conveyor.workers.failures import WorkerDied
from conveyor.workers.reports import (
    InstallReport,
    OptimReport,
    PrepareReport,
    Publication,
    SampleDone,
    SampleReport,
    SampleRow,
    ScoreReport,
    Span,
    StepReport,
    StepSettings,
    TrainReport,
)
from conveyor.workers.start import Workers


def span() -> Span:
    return Span(time.time(), time.time())


class Method:
    """Stands in for a method of a Ray actor: `.remote(…)` gives an awaitable, or two."""

    def __init__(self, call: Callable[..., Any], returns: int = 1) -> None:
        self.call, self.returns = call, returns

    def options(self, num_returns: int) -> "Method":
        return Method(self.call, num_returns)

    def remote(self, *arguments: Any) -> Any:
        async def answer() -> Any:
            await asyncio.sleep(getattr(self.call.__self__, "_slow", 0))  # type: ignore[attr-defined]
            return self.call(*arguments)

        if self.returns == 2:
            report, value = self.call(*arguments)
            return asyncio.ensure_future(asyncio.sleep(0, report)), value
        return answer()


class FakeActor:
    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("stream", "log"):
            return object.__getattribute__(self, name)
        return Method(object.__getattribute__(self, f"_{name}"))


class Engine(FakeActor):
    def __init__(self, reverse: bool) -> None:
        self._version, self._queue, self._reverse, self.log = 0, asyncio.Queue[Any](), reverse, list[Any]()

    def _renew(self) -> None:
        assert not self.log

    def _submit(self, prompt: Prompt, n: int, greedy: bool) -> None:
        self.log.append(prompt.index)
        n += greedy
        for k in reversed(range(n)) if self._reverse else range(n):
            self._queue.put_nowait((SampleDone(SampleId(prompt.index, k), 3, False, self._version, self._version, span()), (prompt, k)))

    @property
    def stream(self) -> Any:
        async def both() -> AsyncIterator[Any]:
            while True:
                done, rollout = await self._queue.get()
                yield asyncio.ensure_future(asyncio.sleep(0, (done,)))
                yield (rollout,)

        stream = both()
        return type("Stream", (), {"remote": staticmethod(lambda: stream)})

    def _install(self, publication: Publication) -> InstallReport:
        self._version = publication.version
        return InstallReport(publication.version, 8, span(), ("bad.weight",) if publication.checksums else ())


class Scorer(FakeActor):
    def __init__(self) -> None:
        self.log = list[Any]()

    def _score(self, roles: tuple[str, ...], rollouts: list[Any]) -> tuple[ScoreReport, Any]:
        self.log.append((roles, [(prompt.index, k) for prompt, k in (ref.bundle[ref.place] for ref in rollouts)]))
        return ScoreReport(span()), "scores"

    def _install(self, role: str, publication: Publication) -> InstallReport:
        self.log.append((role, publication.version))
        return InstallReport(publication.version, 8, span())


class Rank(FakeActor):
    def __init__(self, rank: int, ranks: int, fail: str = "", role: str = "actor") -> None:
        self._rank, self._ranks, self._fail, self._role, self.log = rank, ranks, fail, role, list[Any]()

    def _prepare(self, key: Any, rollouts: list[Any], scores: list[Any], settings: StepSettings) -> PrepareReport:
        mine = [ref.bundle[ref.place] for ref in rollouts[self._rank :: self._ranks]]
        samples = [SampleReport(SampleId(p.index, k), {"r": 1.0}, 1.0, 1.0, 0.3, 3, 3, True, key.step, 3 * key.step) for p, k in mine]
        return PrepareReport(key, tuple(samples), span())

    def _forward_backward(self, key: Any, context: Any, last: bool) -> TrainReport:
        if self._fail == "train":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if self._fail == "die":
            raise RayActorError
        self.log.append((key, last))
        return TrainReport({"loss/policy": Mean(2.0, 4.0)} if self._role == "actor" else {"loss/value": Mean(1.0, 4.0)}, span())

    def _optim_step(self, denominators: Any) -> OptimReport:
        self.log.append(denominators)
        return OptimReport({"actor": StepReport(0.5, 1e-3)}, span())

    def _publish(self, version: int, role: str) -> Publication | None:
        checksums = {"bad.weight": "0"} if self._fail == "sync" else None
        return Publication(version, role, (), checksums, 8, span()) if self._rank == 0 else None

    def _finish_step(self, step: int) -> list[SampleRow]:
        return [SampleRow(SampleId(step, self._rank), "p", "r", {"r": 1.0}, 1.0, 0.0, step, "stop", 1, 3)]

    def _save_checkpoint(self, folder: str) -> None:
        Path(folder, f"rank{self._rank}").write_text("state")


def make_recipe(folder: Path, **changes: Any) -> OnlineRecipe:
    raw = {
        "method": "grpo",
        "output_dir": str(folder),
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [{"name": "r", "model": "r"}],
        "rollout": {"n_samples_per_prompt": 2},
        "train": {"rollout_batch_size": 2},
        "pipeline": {"micro_batch_size": 3},
    }
    made = parse_recipe(raw | changes)
    assert isinstance(made, OnlineRecipe)
    return made


def run(
    recipe: OnlineRecipe,
    *,
    ranks: int = 2,
    fail: str = "",
    reverse: bool = False,
    trainers: list[list[Any]] | None = None,
) -> tuple[Workers, RunFolder]:
    folder = RunFolder(recipe.output_dir)
    folder.path.mkdir(exist_ok=True)
    order = PromptOrder([Prompt(i, i, (1,), "p") for i in range(6)], recipe.train.rollout_batch_size)
    plan = run_plan(recipe, [len(order[s]) for s in range(len(order))], {"rollout": 1, "score": 1, "train": ranks, "other": 1})

    async def go() -> Workers:
        workers = Workers([Engine(reverse)], {"score": [Scorer()]}, trainers or [[Rank(rank, ranks, fail) for rank in range(ranks)]])
        recorder = Recorder(recipe, plan, folder, lambda row: None)
        try:
            await asyncio.wait_for(Executor(Scheduler(plan), workers, order, recorder, folder).run(), 20)
        finally:
            recorder.close()
        return workers

    return asyncio.run(go()), folder


@pytest.mark.parametrize("reverse", [False, True])
def test_each_micro_batch_holds_its_own_samples_in_prompt_order(tmp_path: Path, reverse: bool) -> None:
    workers, _ = run(make_recipe(tmp_path), reverse=reverse)
    scored = [ids for roles, ids in workers.scorers["score"][0].log]
    assert sorted(scored) == [[(0, 0), (0, 1), (1, 0)], [(1, 1)], [(2, 0), (2, 1), (3, 0)], [(3, 1)], [(4, 0), (4, 1), (5, 0)], [(5, 1)]]
    assert workers.engines[0].log == list(range(6))


def test_denominators_are_of_the_whole_update_over_all_ranks(tmp_path: Path) -> None:
    workers, _ = run(make_recipe(tmp_path))
    for rank in workers.trainers[0]:
        counted = [entry for entry in rank.log if hasattr(entry, "tokens")]
        assert [(c.tokens, c.sequences, c.samples) for c in counted] == [(12, 4, 4)] * 3


def test_metrics_samples_and_events_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, folder = run(make_recipe(tmp_path, checkpoint={"every": 2}))
    assert "step 1: every response was cut at rollout.max_response_length (256)" in caplog.text
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and [row["version"] for row in rows] == [1, 2, 3]
    first = rows[0]
    assert first["reward/mean"] == first["reward/r"] == 1.0 and first["loss/policy"] == 0.5 and first["kl"] == pytest.approx(0.1)
    assert first["truncated_fraction"] == 1.0 and first["tokens"] == 12 and first["staleness/max"] == 0
    assert {"idle/rollout", "idle/score", "idle/train", "pipeline/bound", "time/step", "grad_norm", "lr"} <= set(first)
    assert len(folder.samples.read_text().splitlines()) == 6
    tasks = {json.loads(line)["task"] for line in folder.events.read_text().splitlines()}
    assert {"rollout", "score", "prepare", "train", "update", "publish", "install"} <= tasks
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_2", "step_3"]
    assert sorted(path.name for path in (folder.checkpoints / "step_3").iterdir()) == [
        "complete",
        "control.json",
        "groups.json",
        "rank0",
        "rank1",
    ]


def test_metrics_of_a_slow_critic_on_its_own_group_are_in_its_step(tmp_path: Path) -> None:
    changes = {"method": "ppo", "roles": {"critic": "other"}, "devices": {"rollout": 1, "score": 1, "train": 1, "other": 1}}
    recipe = make_recipe(tmp_path, **changes)
    actor, critic = Rank(0, 1), Rank(0, 1, role="critic")
    critic._slow = 0.02
    _, folder = run(recipe, trainers=[[actor], [critic]])
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert len(rows) == 3 and all(row["loss/value"] == 0.25 for row in rows)


def test_a_worker_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"train rank 0 of group train is out of memory \(CUDA out of memory.*\); lower train\.max_tokens_per_micro_batch or"
    ):
        run(make_recipe(tmp_path), fail="train")


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"train rank 0 of group train died.*there is no checkpoint"):
        run(make_recipe(tmp_path), fail="die")


def test_a_mismatched_tensor_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"rollout engine 0 holds other weights.*bad\.weight"):
        run(make_recipe(tmp_path), fail="sync")
