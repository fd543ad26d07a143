"""`conveyor evaluate MODEL`: held-out prompts, sampled by a model and judged by rewards, without training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from conveyor.checks import check_held_out, devices_per_worker, planned_devices
from conveyor.config import OnlineRecipe, UserError
from conveyor.pipeline.held_out import Answer, held_out_line
from conveyor.pipeline.sampling import Sampled, Sampler
from conveyor.pipeline.sampling_recipe import Source, add_condition_argument, condition, lay_over, named_functions, sampling_recipe
from conveyor.report.tables import table
from conveyor.run_folder import HOLDS_RESULTS, RunFolder, is_filled, write_lines
from conveyor.types import Prompt
from conveyor.workers.placement import Placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "conveyor evaluate MODEL [--recipe RECIPE.yaml | --data FILE --reward path.py:function] [--dotted.key value ...]"
    parser.add_argument("model", help="model folder, hub id, or the folder of a run (whose recipe and model are taken)")
    parser.add_argument("--recipe", help="whose evaluate, rewards, rollout and data sections say how")
    parser.add_argument("--data", help="held-out prompts, instead of the recipe's evaluate.path")
    parser.add_argument("--reward", action="append", default=[], help="reward function, instead of the recipe's rewards; may be repeated")
    parser.add_argument("--output-dir", help="for evaluation.json and held_out_samples.jsonl; default: runs/evaluate/ and MODEL's name")
    add_condition_argument(parser)


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    recipe = evaluation_recipe(known, overrides)
    _check_folder(Path(recipe.output_dir))
    prompts = check_held_out(recipe, condition(recipe, known))
    sizes = devices_per_worker(recipe)
    with Placement.create(planned_devices(recipe), recipe.ray, telemetry=recipe.telemetry, devices_per_worker=sizes) as placement:
        line = evaluate(recipe, prompts, placement)
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


def evaluate(recipe: OnlineRecipe, prompts: Sequence[Prompt], placement: Placement) -> dict[str, Any]:
    """Sample and judge held-out prompts; writes held_out_samples.jsonl and returns the line."""
    folder = RunFolder.open(recipe)
    answers: dict[int, list[Answer]] = {}
    rows: dict[int, list[dict[str, Any]]] = {}

    def keep(sampled: Sampled) -> None:
        answers[sampled.prompt.index] = _answers(sampled)
        rows[sampled.prompt.index] = _rows(recipe, sampled)

    with Sampler(recipe, placement) as sampler:
        sampler.sample([replace(prompt, index=-1 - prompt.index) for prompt in prompts], keep)
    write_lines(folder.held_out_samples, (row for _, of_prompt in sorted(rows.items()) for row in of_prompt))
    return held_out_line(recipe, [of_prompt for _, of_prompt in sorted(answers.items())])


def _answers(sampled: Sampled) -> list[Answer]:
    return [
        Answer(rewards, score, len(rollout.response_ids), rollout.truncated)
        for rollout, rewards, score in zip(sampled.rollouts, sampled.rewards, sampled.scores, strict=True)
    ]


def _rows(recipe: OnlineRecipe, sampled: Sampled) -> list[dict[str, Any]]:
    """Lines of held_out_samples.jsonl, one a sample."""
    return [
        {"row": sampled.prompt.row + 1, "sample": rollout.sample, "greedy": rollout.sample == recipe.rollout.n_samples_per_prompt,
         "prompt": sampled.prompt.text, "response": rollout.text, "rewards": dict(rewards),
         "finish_reason": rollout.finish_reason, "response_length": int(rollout.sampled_mask.sum())}
        for rollout, rewards in zip(sampled.rollouts, sampled.rewards, strict=True)
    ]  # fmt: skip


def evaluation_recipe(known: argparse.Namespace, overrides: dict[str, str]) -> OnlineRecipe:
    """A recipe of the parts of the given one that an evaluation needs.

    Raises:
        UserError: there is none, it does not say what to evaluate, or a key is wrong.
    """
    raw = _source(known)
    lay_over(raw, overrides, "an evaluation")
    if isinstance(raw.get("rollout"), dict):
        raw["rollout"] = {**raw["rollout"], "n_samples_per_prompt": 1}
    name = "_".join(Path(known.model).parts[-2:]).strip("/.") or "model"
    recipe = sampling_recipe(raw, known.output_dir or f"runs/evaluate/{name}", "evaluate")
    section = recipe.evaluate
    assert section is not None
    rollout = {"n_samples_per_prompt": section.n_samples_per_prompt, "temperature": section.temperature or recipe.rollout.temperature}
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=rollout)})


def _source(known: argparse.Namespace) -> dict[str, Any]:
    """Sections of the recipe that is named, or of the run that MODEL is, or of the options alone."""
    source = Source.read(known.model, known.recipe)
    if source.recipe is None and not (known.data and known.reward):
        raise UserError("evaluate: name a recipe with --recipe, or prompts and a reward with --data and --reward")
    if source.recipe is not None and not source.samples and not (known.data and known.reward):
        raise UserError(f"{source.file}: method {source.recipe.method} does not sample; name prompts and a reward with --data and --reward")
    raw = source.sections
    if known.data is not None:
        raw["evaluate"] = raw.get("evaluate", {}) | {"path": known.data}
        raw.setdefault("data", {"path": known.data})
    if known.reward:
        raw["rewards"] = named_functions(known.reward)
        raw.get("evaluate", {}).pop("success_reward", None)
    if "evaluate" not in raw:
        raise UserError(f"{source.file}: has no evaluate section; name the held-out prompts with --data")
    if not raw.get("rewards"):
        raise UserError(f"{source.file}: has no rewards to judge answers by; name one with --reward")
    source.fit_lengths()
    return raw
