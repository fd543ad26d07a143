"""Failures on a real Ray: what is left of an exception that has travelled, and how soon a rank that hangs is noticed."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conveyor.config import RunError, sections
from conveyor.pipeline.asking import Asking
from conveyor.workers import fit as fit_module
from conveyor.workers.failures import Who
from conveyor.workers.placement import Placement
from tests.workers.ranks_that_fail import HangingRank
from tests.workers.waiting import Worker


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_when_the_others_have_waited(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "FitWorker", HangingRank)
    monkeypatch.setattr(fit_module, "LISTEN_SECONDS", 1.0)
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_1" / "complete").touch()
    recipe = SimpleNamespace(ray=sections.Ray(timeout=3), output_dir=str(tmp_path))
    with Placement.create({"train": 2}, recipe.ray) as placement:
        rows = fit_module.fit_on(placement, (recipe, None, None, None, 0))  # type: ignore[arg-type]
        assert next(rows) == {"step": 1}
        start = time.monotonic()
        with pytest.raises(RunError) as error:
            next(rows)
    assert time.monotonic() - start < 10
    assert str(error.value) == (
        "train rank 1 of group train has not finished its part of an update within 3 s (ray.timeout); train rank 0 of group train waited "
        f"in vain; go on from {tmp_path}/checkpoints/step_1 with checkpoint.resume"
    )


@pytest.mark.slow
def test_no_memory_is_told_in_one_line_wherever_it_was_missing(ray_session: None) -> None:
    async def said(worker: object, method: str, stage: str) -> str:
        with pytest.raises(RunError) as error:
            await Asking(30, lambda: "; there is no checkpoint").one(Who(stage, "all", 2), method, getattr(worker, method).remote())
        return str(error.value)

    with Placement.create({"all": 0.1}, sections.Ray()) as placement:
        worker = placement.actor(Worker, "all", 0, cores=())
        trained = asyncio.run(said(worker, "forward_backward", "train"))
        installed = asyncio.run(said(worker, "install", "score"))
    assert trained == (
        "train rank 2 of group all is out of memory (torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "79.10 GiB); lower train.max_tokens_per_micro_batch or pipeline.micro_batch_size, or set model.gradient_checkpointing; there is no "
        "checkpoint"
    )
    assert (
        installed.startswith("score worker 2 of group all is out of memory (RuntimeError: ")
        and "lower pipeline.micro_batch_size" in installed
    )
