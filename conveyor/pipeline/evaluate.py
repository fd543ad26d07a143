"""`conveyor evaluate MODEL`: held-out prompts, sampled by a model and judged by rewards, without training."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from ray.exceptions import RayTaskError
from rich.console import Console

from conveyor.checks import check_held_out, devices_per_worker, planned_devices, read_model_config
from conveyor.config import OnlineRecipe, RunError, UserError, load_recipe, parse_recipe
from conveyor.data.tokenizer import check_folder_or_hub_id
from conveyor.pipeline.executor import Executor
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.report.progress import read_metrics
from conveyor.report.tables import table
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt
from conveyor.workers.placement import Placement
from conveyor.workers.start import start_workers

KEPT = ("seed", "data", "rollout", "evaluate", "rewards", "devices", "roles", "ray", "telemetry")
"""Sections of a recipe that say how to evaluate."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "conveyor evaluate MODEL [--recipe RECIPE.yaml | --data FILE --reward path.py:function] [--dotted.key value ...]"
    parser.add_argument("model", help="model folder, hub id, or the folder of a run (whose recipe and model are taken)")
    parser.add_argument("--recipe", help="whose evaluate, rewards, rollout and data sections say how")
    parser.add_argument("--data", help="held-out prompts, instead of the recipe's evaluate.path")
    parser.add_argument("--reward", action="append", default=[], help="reward function, instead of the recipe's rewards; may be repeated")
    parser.add_argument("--output-dir", default="runs/evaluate", help="for evaluation.json and samples.jsonl; default: %(default)s")


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    recipe = evaluation_recipe(known, overrides)
    prompts = check_held_out(recipe)
    sizes = devices_per_worker(recipe)
    with Placement.create(planned_devices(recipe), recipe.ray, telemetry=recipe.telemetry, devices_per_worker=sizes) as placement:
        try:
            line = evaluate(recipe, prompts, placement)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError | RunError) else error) from None
    folder = RunFolder(recipe.output_dir)
    text = json.dumps({"model": recipe.model.path, **line}, indent=2) + "\n"
    (folder.path / "evaluation.json").write_text(text, encoding="utf-8")
    Console().print(table(recipe.model.path, ["", "value"], [[name, value] for name, value in line.items()]))
    print(f"{folder.path}/evaluation.json, {folder.held_out_samples}")
    return 0


def evaluate(recipe: OnlineRecipe, prompts: list[Prompt], placement: Placement) -> dict[str, Any]:
    """A run of no steps: the scheduler evaluates the version that the engines start with."""
    folder = RunFolder.open(recipe)
    slots = {group: placement.slots(group) for group in placement.devices}
    plan = run_plan(recipe, [], slots, evaluation_prompts=len(prompts))
    workers = start_workers(recipe, placement, [], 1)
    clocks = workers.ready()
    recorder = Recorder(recipe, plan, folder, lambda row: None, clocks)
    try:
        asyncio.run(Executor(Scheduler(plan), workers, None, recorder, folder, prompts, keep_held_out=True).run())
    finally:
        recorder.close()
    (line,) = read_metrics(folder.evaluations)
    return {name: value for name, value in line.items() if name.startswith("eval/") and name != "eval/coverage"}


def evaluation_recipe(known: argparse.Namespace, overrides: dict[str, str]) -> OnlineRecipe:
    """A recipe of the parts of the given one that an evaluation needs.

    Raises:
        UserError: there is none, or it does not say what to evaluate.
    """
    run_folder = RunFolder(known.model)
    source = Path(known.recipe) if known.recipe else run_folder.config
    model = str(run_folder.model) if run_folder.model.is_dir() else known.model
    raw: dict[str, Any] = {}
    if known.recipe or source.is_file():
        given = load_recipe(source)
        if not isinstance(given, OnlineRecipe):
            raise UserError(f"{source}: method {given.method} does not sample; name the held-out prompts with --data and --reward")
        dumped = given.model_dump(mode="json")
        raw = {key: dumped[key] for key in KEPT} | {"model": dumped["model"]}
    elif not known.data or not known.reward:
        raise UserError("evaluate: name a recipe with --recipe, or prompts and a reward with --data and --reward")
    raw |= {"method": "reinforce", "output_dir": known.output_dir, "overwrite": True, "algorithm": {"kl_coef": 0.0}}
    raw["model"] = raw.get("model", {}) | {"path": model, "tokenizer": None}
    if known.data:
        raw["evaluate"] = (raw.get("evaluate") or {}) | {"path": known.data}
        raw.setdefault("data", {"path": known.data})
    if not source.is_file():
        _fit_lengths(raw, model)
    if known.reward:
        raw["rewards"] = [{"name": _name(function), "function": function} for function in known.reward]
    if not raw.get("evaluate"):
        raise UserError(f"{source}: has no evaluate section; name the held-out prompts with --data")
    return _with_devices(_overridden(raw, overrides))


def _fit_lengths(raw: dict[str, Any], model: str) -> None:
    """Without a recipe: half of what a small model takes for the prompt, half for the answer."""
    check_folder_or_hub_id("MODEL", model)
    limit = getattr(read_model_config("MODEL", model), "max_position_embeddings", None) or 1024
    raw["data"]["max_prompt_length"] = min(512, limit // 2)
    raw["rollout"] = {"max_response_length": min(256, limit // 2)}


def _overridden(raw: dict[str, Any], overrides: dict[str, str]) -> dict[str, Any]:
    for key, text in overrides.items():
        *parents, last = key.split(".")
        if parents and parents[0] not in (*KEPT, "model"):
            raise UserError(f"--{key}: an evaluation has no such key; sections: model, {', '.join(KEPT)}")
        place: Any = raw
        for name in parents:
            place = place[int(name)] if isinstance(place, list) and name.isdigit() else place.setdefault(name, {})
        place[last] = yaml.safe_load(text) if text.strip() else text
    return raw


def _with_devices(raw: dict[str, Any]) -> OnlineRecipe:
    """Keeps only the device groups and roles that an evaluation has a use for."""
    rewards = raw.get("rewards") or []
    models = {reward["name"] for reward in rewards if reward.get("model")}
    for reward in rewards:
        reward["normalize"] = "none"
    rollout = raw.get("rollout") or {}
    raw["rollout"] = rollout | {"dynamic_sampling": False}
    section = raw["evaluate"]
    wanted = section.get("n_samples_per_prompt", 1) + bool(section.get("greedy"))
    raw["rollout"]["max_concurrent_requests"] = max(wanted, rollout.get("max_concurrent_requests", 64))
    raw["rollout"]["n_samples_per_prompt"] = 1
    kept = {"rollout", *models} | ({"score"} if models else set())
    raw["roles"] = {role: group for role, group in (raw.get("roles") or {}).items() if role in kept}
    raw["evaluate"] = section | {"in_bubbles": None}
    bare = parse_recipe({**raw, "devices": None}, source="evaluate")
    assert isinstance(bare, OnlineRecipe)
    groups = {bare.role_group("rollout"), *(bare.role_group(name) for name in models)}
    if raw.get("devices"):
        raw["devices"] = {group: count for group, count in raw["devices"].items() if group in groups}
    made = parse_recipe(raw, source="evaluate")
    assert isinstance(made, OnlineRecipe)
    return made


def _name(function: str) -> str:
    """`path.py:exact` → `exact`"""
    name = function.rpartition(":")[2].rpartition(".")[2]
    return name if name.isidentifier() else "reward"
