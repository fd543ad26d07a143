"""What a run left in its folder, as far as its timing goes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conveyor.config import OnlineRecipe, UserError, parse_recipe
from conveyor.pipeline.run_plan import RunPlan, run_plan
from conveyor.plan.lengths import Size, Workload
from conveyor.report.events import JUDGE, MOVES, Event, is_held_out, read_events
from conveyor.report.jsonl import read_objects
from conveyor.report.summary import read_config
from conveyor.report.timeline import devices

TASKS = frozenset({"rollout", JUDGE, "score", "prepare", "train", "update", "publish", "install", "checkpoint"})
"""What is simulated. Evaluations, which fill bubbles, are not."""


@dataclass(frozen=True)
class RunRecord:
    """A finished run, or as much as there is of one."""

    recipe: OnlineRecipe
    events: list[Event]
    workload: Workload
    step_groups: tuple[int, ...]
    """Prompt groups of each step, of whole steps from the first."""

    @cached_property
    def devices(self) -> dict[str, int]:
        """Device group → its devices: those that anything happened on, counted as workers of one kind."""
        return devices(self.events)

    @cached_property
    def micro_batches(self) -> dict[tuple[int, int], list[Size]]:
        """(step, number) → sizes of its samples."""
        names: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for event in self.events:
            if event.task == "prepare" and event.micro_batch is not None:
                names[event.step, event.micro_batch].update(event.samples)
        return {key: [self.workload.at(*name) for name in sorted(samples)] for key, samples in names.items()}

    def plan(self) -> RunPlan:
        """The plan that the run was driven by, evaluations left out."""
        slept = any(event.task in MOVES for event in self.events)
        plan = run_plan(self.recipe, self.step_groups, self.devices, sleeping=self.recipe.sleeping_groups(gpus=True) if slept else None)
        return replace(plan, evaluation=None)


def read_run(folder: str | Path) -> RunRecord:
    """Read config.yaml, events.jsonl and samples.jsonl of an online run.

    Raises:
        UserError: a file is missing or of another kind of run, or no step has ended.
    """
    path = Path(folder)
    for name in ("config.yaml", "events.jsonl", "samples.jsonl", "metrics.jsonl"):
        if not (path / name).is_file():
            raise UserError(f"{path}: holds no {name}; name the folder of a finished online run")
    try:
        raw = yaml.safe_load(read_config(path / "config.yaml"))
    except ValueError as error:
        raise UserError(str(error)) from None
    recipe = parse_recipe(raw if isinstance(raw, dict) else {}, source=str(path / "config.yaml"))
    if not isinstance(recipe, OnlineRecipe):
        raise UserError(f"{path}: {recipe.method} has no stages to plan; name a run of a method that samples")
    try:
        rows = [row for _, row in read_objects(path / "samples.jsonl")]
        tokens = {row["step"]: row["tokens"] for _, row in read_objects(path / "metrics.jsonl")}
        events = read_events(path / "events.jsonl")
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: {error}") from None
    if not rows:
        raise UserError(f"{path}: no step has ended yet")
    if not any(event.samples for event in events):
        raise UserError(f"{path}: its events do not name their samples; run it again with this version")
    try:
        step_groups, workload = _samples(rows, tokens, recipe.samples_per_group)
        kept = [event for event in events if event.step <= len(step_groups) and event.task in TASKS and not is_held_out(event)]
        workload = _with_dropped(workload, kept)
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        files = "samples.jsonl, metrics.jsonl and events.jsonl"
        raise UserError(f"{path}: {files} do not fit together ({type(error).__name__}: {error})") from None
    record = RunRecord(recipe, kept, workload, step_groups)
    placed = {recipe.role_group(role) for role in recipe.placed_roles}
    if missing := sorted(placed - record.devices.keys()):
        raise UserError(f"{path}/events.jsonl: nothing happened on the device group {missing[0]}; the file is not whole")
    return record


def _samples(rows: list[dict[str, Any]], tokens: dict[int, int], n: int) -> tuple[tuple[int, ...], Workload]:
    """Groups of each step, and sizes of all samples. Lengths in tokens are in the rows where the run wrote them; elsewhere they
    are taken in proportion to the characters of the texts, so that those of a step add up to its `tokens`."""
    characters: dict[int, int] = defaultdict(int)
    groups: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        characters[row["step"]] += len(row["response"]) + 1
        groups[row["step"]].add(row["group"])
    count = 1 + max(max(of_step) for of_step in groups.values())
    responses, prompts = np.ones((count, n), dtype=np.int64), np.ones(count, dtype=np.int64)
    for row in rows:
        a_character = tokens[row["step"]] / characters[row["step"]]
        response = row.get("response_length") or round((len(row["response"]) + 1) * a_character)
        prompt = row.get("prompt_length") or round(len(row["prompt"]) * a_character)
        responses[row["group"], row["sample"]], prompts[row["group"]] = max(1, response), max(1, prompt)
    steps = range(1, max(groups) + 1)
    return tuple(len(groups[step]) for step in steps), Workload(responses, prompts)


def _with_dropped(workload: Workload, events: list[Event]) -> Workload:
    """With the groups that dynamic sampling left out. They have no rows: their responses are taken to be as long as at the mean pace of
    the others is sampled in the time that they were in an engine."""
    trained = {sample for event in events if event.task == "prepare" for sample in event.samples}
    spans = {sample: event.end - event.start for event in events if event.task == "rollout" for sample in event.samples}
    judged = {sample for event in events if event.task == JUDGE for sample in event.samples}
    dropped = {sample: seconds for sample, seconds in spans.items() if sample in judged - trained}
    if not dropped:
        return workload
    pace = sum(workload.at(*sample).response for sample in trained & spans.keys()) / sum(spans[sample] for sample in trained & spans.keys())
    count, (groups, n) = 1 + max(group for group, _ in (*trained, *dropped)), workload.responses.shape
    responses, prompts = np.ones((max(count, groups), n), dtype=np.int64), np.full(max(count, groups), round(workload.facts.prompt))
    responses[:groups], prompts[:groups] = workload.responses, workload.prompts
    for (group, sample), seconds in dropped.items():
        responses[group, sample] = max(1, round(seconds * pace))
    return Workload(responses, prompts, frozenset(group for group, _ in dropped))
