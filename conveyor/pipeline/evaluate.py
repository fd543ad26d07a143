"""`conveyor evaluate MODEL`: held-out prompts, sampled by a model and judged by rewards, without training."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError
from rich.console import Console

from conveyor.checks import check_held_out, devices_per_worker, planned_devices, read_model_config
from conveyor.config import OnlineRecipe, RunError, UserError, load_recipe, parse_recipe
from conveyor.config.load import set_key
from conveyor.data.tokenizer import check_folder_or_hub_id
from conveyor.pipeline.executor import Executor
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.report.progress import read_metrics
from conveyor.report.tables import table
from conveyor.run_folder import HOLDS_RESULTS, RunFolder, is_filled
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
    parser.add_argument("--output-dir", help="for evaluation.json and held_out_samples.jsonl; default: runs/evaluate/ and MODEL's name")


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    recipe = evaluation_recipe(known, overrides)
    _check_folder(Path(recipe.output_dir))
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
    section = recipe.evaluate
    assert section is not None
    print(f"right: {section.success_reward or 'the weighted reward'} ≥ {section.success_threshold:g} (evaluate.success_threshold)")
    print(f"{folder.path}/evaluation.json, {folder.held_out_samples}")
    return 0


def _check_folder(folder: Path) -> None:
    """An evaluation replaces only what an earlier one has made."""
    of_a_run = [name for name in (*HOLDS_RESULTS, "checkpoints") if is_filled(folder / name)]
    if of_a_run:
        raise UserError(f"--output-dir: {folder} holds a run ({of_a_run[0]}); name another folder")


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
        UserError: there is none, it does not say what to evaluate, or a key is wrong.
    """
    raw = _source(known)
    for key, text in overrides.items():
        if key.partition(".")[0] not in (*KEPT, "model"):
            raise UserError(f"--{key}: an evaluation has no such key; sections: model, {', '.join(KEPT)}")
        set_key(raw, key, text)
    name = "_".join(Path(known.model).parts[-2:]).strip("/.") or "model"
    return _for_evaluation(raw, known.output_dir or f"runs/evaluate/{name}")


def _source(known: argparse.Namespace) -> dict[str, Any]:
    """Sections of the recipe that is named, or of the run that MODEL is, or of the options alone."""
    run_folder = RunFolder(known.model)
    source = Path(known.recipe) if known.recipe else run_folder.config
    model = str(run_folder.model) if run_folder.model.is_dir() else known.model
    raw: dict[str, Any] = {}
    if known.recipe or source.is_file():
        given = load_recipe(source)
        if isinstance(given, OnlineRecipe):
            dumped = given.model_dump(mode="json", exclude_none=True)
            raw = {key: dumped[key] for key in (*KEPT, "model") if key in dumped}
        elif not known.data or not known.reward:
            raise UserError(f"{source}: method {given.method} does not sample; name prompts and a reward with --data and --reward")
    elif not known.data or not known.reward:
        raise UserError("evaluate: name a recipe with --recipe, or prompts and a reward with --data and --reward")
    raw["model"] = {**raw.get("model", {}), "path": model}
    raw["model"].pop("tokenizer", None)
    if known.data is not None:
        raw["evaluate"] = raw.get("evaluate", {}) | {"path": known.data}
        raw.setdefault("data", {"path": known.data})
    if known.reward:
        short = [_name(function) for function in known.reward]
        # Of two functions with one name the files tell them apart.
        files = [Path(function.rpartition(":")[0]).stem for function in known.reward]
        names = [name if short.count(name) == 1 else f"{file}_{name}" for name, file in zip(short, files, strict=True)]
        raw["rewards"] = [{"name": name, "function": function} for name, function in zip(names, known.reward, strict=True)]
        raw.get("evaluate", {}).pop("success_reward", None)
    if "evaluate" not in raw:
        raise UserError(f"{source}: has no evaluate section; name the held-out prompts with --data")
    if not raw.get("rewards"):
        raise UserError(f"{source}: has no rewards to judge answers by; name one with --reward")
    if "rollout" not in raw:
        _fit_lengths(raw, model)
    return raw


def _fit_lengths(raw: dict[str, Any], model: str) -> None:
    """Without a recipe: half of what a small model takes for the prompt, half for the answer."""
    check_folder_or_hub_id("MODEL", model)
    limit = getattr(read_model_config("MODEL", model), "max_position_embeddings", None) or 1024
    raw["data"]["max_prompt_length"] = min(512, limit // 2)
    raw["rollout"] = {"max_response_length": min(256, limit // 2)}


def _for_evaluation(raw: dict[str, Any], output_dir: str) -> OnlineRecipe:
    """With the device groups and roles that an evaluation has a use for, and nothing of the training's own."""
    given = raw.get("rollout")
    slots = given.get("max_concurrent_requests", 64) if isinstance(given, dict) else 64
    if type(slots) is int and (given is None or isinstance(given, dict)):  # a prompt's samples are to fit; other values are refused below
        raw = {**raw, "rollout": {**(given or {}), "max_concurrent_requests": max(slots, 2**20), "dynamic_sampling": False}}
    common = {"method": "reinforce", "output_dir": output_dir, "overwrite": True, "algorithm": {"kl_coef": 0.0}}
    bare = _parsed({**raw, **common, "devices": None, "roles": {}})
    assert bare.evaluate is not None
    asked = bare.model_dump(mode="json")
    wanted = bare.evaluate.n_samples_per_prompt + bare.evaluate.greedy
    asked["rollout"] |= {"n_samples_per_prompt": 1, "max_concurrent_requests": max(slots, wanted)}
    asked["evaluate"]["in_bubbles"] = None
    for reward in asked["rewards"]:
        if reward["normalize"] != "none":  # scales are the training's, and so is a clip of what they scale
            reward |= {"normalize": "none", "clip": None}
    roles, devices = raw.get("roles") or {}, raw.get("devices")
    if isinstance(roles, dict):
        rollout = roles.get("rollout", "rollout")
        score = {reward.name: roles.get(reward.name) or roles.get("score", "score") for reward in bare.model_rewards}
        roles = {"rollout": rollout, "actor": rollout, **score}  # there is no actor; its place is nobody's
        if isinstance(devices, dict):
            devices = {group: count for group, count in devices.items() if group in roles.values()}
    return _parsed({**asked, "roles": roles, "devices": devices})


def _parsed(raw: dict[str, Any]) -> OnlineRecipe:
    made = parse_recipe(raw, source="evaluate")
    assert isinstance(made, OnlineRecipe)
    return made


def _name(function: str) -> str:
    """`path.py:exact` → `exact`"""
    name = function.rpartition(":")[2].rpartition(".")[2]
    return name if name.isidentifier() else "reward"
