"""The main loop of the methods that sample. Everything of a run, on one screen.

check ─▶ place ─▶ start workers ─▶ run the schedule ─▶ save the model
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from conveyor.checks import check_online, devices_per_worker, load_held_out, planned_devices, store_gib
from conveyor.config import OnlineRecipe, RunError, UserError
from conveyor.data.prompts import PromptOrder
from conveyor.pipeline.asking import Asking
from conveyor.pipeline.control import StepControl
from conveyor.pipeline.executor import Executor
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import RunPlan, run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.pipeline.streams import open_streams, transport_of
from conveyor.report.events import read_events
from conveyor.report.page import write_report
from conveyor.report.progress import RunProgress
from conveyor.report.trace import write_trace
from conveyor.run_folder import RunFolder, read_control, read_untrained
from conveyor.workers.failures import Who
from conveyor.workers.placement import Placement
from conveyor.workers.start import Workers, start_workers
from conveyor.workers.team import members

log = logging.getLogger(__name__)


def run_online(recipe: OnlineRecipe, gradient_folder: Path | None = None) -> dict[str, Any]:
    """Train by a recipe; returns the last step's metrics.

    Args:
        gradient_folder: where each train group writes the gradient of its first update; default: nowhere.

    Raises:
        UserError: bad settings, data or devices; before any model is loaded.
    """
    order = check_online(recipe)
    sizes = devices_per_worker(recipe)
    with Placement.create(
        planned_devices(recipe), recipe.ray, telemetry=recipe.telemetry, devices_per_worker=sizes, store_gib=store_gib(recipe)
    ) as placement:
        try:
            return run_placed(recipe, order, placement, gradient_folder=gradient_folder)
        except RayTaskError as error:
            # The worker's own exception says it all; Ray's wraps it in a page of trace.
            raise (error.cause if isinstance(error.cause, UserError | RunError) else error) from None


def run_placed(
    recipe: OnlineRecipe,
    order: PromptOrder,
    placement: Placement,
    engines: list[Any] | None = None,
    gradient_folder: Path | None = None,
) -> dict[str, Any]:
    """The run itself, on devices that are reserved.

    Args:
        order: of a recipe that `check_online` found sound.
        engines: rollout engines that run already, with whatever weights; default: new ones.
    """
    folder = RunFolder.open(recipe)
    checkpoint = folder.newest_checkpoint() if recipe.checkpoint.resume else None
    if recipe.checkpoint.resume and checkpoint is None:
        log.warning("checkpoint.resume: %s has no checkpoint; starting from the beginning", folder.checkpoints)
    untrained = read_untrained(checkpoint[1]) if checkpoint else None
    folder.rewind(checkpoint[0] if checkpoint else 0)
    step_groups = groups_of_steps(recipe, order)
    slots = {group: placement.slots(group) for group in placement.devices}
    held_out = load_held_out(recipe)
    sleeping = recipe.sleeping_groups(gpus=placement.kind == "GPU")
    plan = run_plan(
        recipe,
        step_groups,
        slots,
        start_step=checkpoint[0] if checkpoint else 0,
        engines=len(engines) if engines else None,
        evaluation_prompts=len(held_out),
        untrained=untrained,
        sleeping=sleeping,
    )
    trained = [(group.group, group.roles) for group in plan.train_groups]
    transport = transport_of(recipe, placement.kind)
    workers = start_workers(recipe, placement, trained, _total_updates(plan), engines, sleeping)
    with RunProgress(recipe.method, total=len(order), done=plan.start_step) as progress:
        clocks, asking = workers.ready(progress.ready), Asking(recipe.ray.timeout, folder.what_is_left)
        streams = open_streams(recipe, transport, workers.trainers[0], workers.engines) if transport else None
        if checkpoint:
            _on_every_rank(workers, plan, asking, "load_checkpoint", str(checkpoint[1]))
            _load_references(workers, plan, *checkpoint)
        if gradient_folder is not None:
            _on_every_rank(workers, plan, asking, "record_gradient", str(gradient_folder.absolute()))
        recorder = Recorder(recipe, plan, folder, progress.step, clocks)
        try:
            if plan.start_step < len(order):
                control = StepControl(recipe, plan.start_step, read_control(checkpoint[1]) if checkpoint else None)
                asyncio.run(Executor(Scheduler(plan), workers, order, recorder, folder, held_out, control, streams).run())
        finally:
            recorder.close()
    write_trace(read_events(folder.events), folder.trace)
    write_report(folder.path)
    _on_every_rank(workers, plan, asking, "save_model", str(folder.model), str(folder.critic))
    return recorder.last_row


def groups_of_steps(recipe: OnlineRecipe, order: PromptOrder) -> list[int]:
    """Prompt groups of each step. Dynamic sampling goes on in the prompt order until a step has as many as any other."""
    if recipe.rollout.dynamic_sampling:
        return [recipe.train.rollout_batch_size] * len(order)
    return [len(order[step]) for step in range(len(order))]


def _load_references(workers: Workers, plan: RunPlan, step: int, folder: Path) -> None:
    """References that had been refreshed when the checkpoint was written (`Executor._save_reference`)."""
    refreshed = [part for part in plan.parts if part.refresh is not None and step % part.refresh and step > part.refresh]
    every = [member for part in refreshed for worker in workers.scorers[part.group] for member in members(worker)]
    ray.get([member.load_weights.remote("reference", str(folder)) for member in every])


def _total_updates(plan: RunPlan) -> int:
    per_step = (-(-groups * plan.samples_per_group // plan.samples_per_update) for groups in plan.step_groups)
    return plan.update_epochs * sum(per_step)


def _on_every_rank(workers: Workers, plan: RunPlan, asking: Asking, method: str, *arguments: Any) -> None:
    async def of_group(group: str, ranks: list[Any]) -> None:
        calls = [(Who("train", group, rank), getattr(worker, method).remote(*arguments)) for rank, worker in enumerate(ranks)]
        await asking.all(calls, method)

    async def go() -> None:
        groups = zip(plan.train_groups, workers.trainers, strict=True)
        await asyncio.gather(*(of_group(line.group, ranks) for line, ranks in groups))

    asyncio.run(go())
