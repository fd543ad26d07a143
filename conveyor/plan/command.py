"""`conveyor plan`: which devices for which stage, before anything is run."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from conveyor.config import OnlineRecipe, UserError, load_recipe, parse_recipe
from conveyor.plan.fit import Profile, Validation, validate
from conveyor.plan.hardware import GPUS, gpu
from conveyor.plan.known_models import NAMED, model_shape
from conveyor.plan.lengths import Workload, parse_lengths
from conveyor.plan.memory import Shapes
from conveyor.plan.predict import CostSource, Prediction, simulated_steps
from conveyor.plan.record import read_run
from conveyor.plan.roofline import Roofline
from conveyor.plan.search import MOST_STALENESS, Found, search
from conveyor.report.tables import Cell, table, wide_console

MOST_DEVICES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Any key of the recipe can be set too: --dotted.key value. A profiled run has the recipe's roles."
    parser.add_argument("recipe", nargs="?", help="YAML file of an online method; only --validate needs none")
    parser.add_argument("--profile", metavar="RUN", help="fit the costs to a run's folder")
    parser.add_argument("--model", metavar="NAME", help=f"costs from the data sheet: {', '.join(NAMED)}, or a folder with a config.json")
    parser.add_argument("--reward-model", metavar="NAME", help="shape of critic and reward models; default: that of --model")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)}; default: %(default)s")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices to place the roles on; default: those of the recipe, or of the run")
    parser.add_argument("--lengths", metavar="LAW", help="response lengths, e.g. lognormal:mean=800,sigma=1,cap=4096; default: the run's")
    parser.add_argument(
        "--prompt", type=int, metavar="TOKENS", help="length of a prompt; default: the run's, or half of data.max_prompt_length"
    )
    parser.add_argument(
        "--judge-seconds", type=float, metavar="S",
        help="what rewards that are functions or urls take for a sample; default: as in the run, or 0",
    )  # fmt: skip
    parser.add_argument(
        "--equal-groups", type=float, metavar="SHARE",
        help="dynamic sampling: share of the groups whose rewards are all equal; default: that of the run, or 0",
    )  # fmt: skip
    parser.add_argument("--write", metavar="PATH", help="write the recipe with the best placement")
    parser.add_argument("--validate", metavar="RUN", help="predict a run from its own costs, and compare with what was measured")


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Carry the command out. Raises UserError for bad input."""
    console = wide_console()
    if known.validate:
        console.print(*validation_tables(validate(read_run(known.validate))))
        if known.recipe is None:
            return 0
    if known.recipe is None:
        raise UserError("plan: name a recipe, e.g. recipes/tiny/ppo.yaml")
    recipe = load_recipe(known.recipe, overrides)
    if not isinstance(recipe, OnlineRecipe):
        raise UserError(f"{known.recipe}: {recipe.method} has no stages to plan; it trains on all devices it is given")
    _check_judging(known, recipe)
    if known.write:
        _check_writable(Path(known.write))
    source, devices, widths = _source(known, recipe)
    workload, described = _workload(known, recipe, source)
    found = search(recipe, source, workload, devices, widths)
    _print(console, found, devices, described, recipe)
    if known.write:
        _write(Path(known.write), known.recipe, recipe, found.best[0])
        console.print(f"written: {known.write}")
    return 0


def _source(known: argparse.Namespace, recipe: OnlineRecipe) -> tuple[CostSource, int, tuple[int, ...]]:
    """(where costs come from, devices, tensor parallel sizes to try)."""
    if (known.profile is None) == (known.model is None):
        which = "give one of them, not both" if known.profile else "say where costs come from"
        raise UserError(f"plan: {which}: --profile RUN (fits a run's events) or --model 70b --gpu h100 --gpus 32 (data sheet)")
    given = known.gpus if known.gpus is not None else int(sum((recipe.devices or {}).values())) or None
    if known.profile is not None:
        profile = Profile.of(read_run(known.profile), known.judge_seconds)
        measured = profile.run.recipe
        there = sum((measured.devices or profile.run.devices).values())
        return profile, _checked(int(there) if given is None else given), (measured.rollout.tensor_parallel_size,)
    policy = model_shape(known.model)
    kind = gpu(known.gpu)
    possible = (1,) if recipe.rollout.engine == "transformers" else (1, 2, 4, 8)
    widths = tuple(width for width in possible if width <= kind.node_size and policy.heads % width == 0)
    rewards = model_shape(known.reward_model, "--reward-model") if known.reward_model else policy
    return Roofline(Shapes(policy, rewards), kind, known.judge_seconds or 0.0), _checked(given), widths


def _check_judging(known: argparse.Namespace, recipe: OnlineRecipe) -> None:
    if known.judge_seconds is not None:
        if not recipe.judged_rewards:
            raise UserError("--judge-seconds: the recipe has no reward that is a function or url")
        if not 0 <= known.judge_seconds < math.inf:
            raise UserError(f"--judge-seconds: {known.judge_seconds:g}: must be 0 or more")
    if known.equal_groups is not None:
        if not recipe.rollout.dynamic_sampling:
            raise UserError("--equal-groups: the recipe has no rollout.dynamic_sampling")
        if not 0 <= known.equal_groups <= 1:
            raise UserError(f"--equal-groups: {known.equal_groups:g}: must be from 0 to 1")


def _checked(devices: int | None) -> int:
    if devices is None or not 1 <= devices <= MOST_DEVICES:
        named = "none given, and the recipe has no devices" if devices is None else devices
        raise UserError(f"--gpus: {named}; name 1 to {MOST_DEVICES}")
    return devices


def _workload(known: argparse.Namespace, recipe: OnlineRecipe, source: CostSource) -> tuple[Workload, str]:
    """Sizes of as many steps as any simulation has, and what they are, in words."""
    steps = simulated_steps(max(MOST_STALENESS, recipe.pipeline.max_staleness))
    groups, n, longest = steps * recipe.train.rollout_batch_size, recipe.samples_per_group, recipe.rollout.max_response_length
    recorded = source.run.workload if isinstance(source, Profile) else None
    usual = round(recorded.facts.prompt) if recorded else max(1, recipe.data.max_prompt_length // 2)
    usual = min(usual, recipe.data.max_prompt_length)
    prompt = usual if known.prompt is None else known.prompt
    if not 1 <= prompt <= recipe.data.max_prompt_length:
        raise UserError(f"--prompt: {prompt}: must be from 1 to data.max_prompt_length ({recipe.data.max_prompt_length})")
    equal = (recorded.equal_share if recorded else 0.0) if known.equal_groups is None else known.equal_groups
    if recorded is not None and known.lengths is None:
        drawn = np.random.default_rng(recipe.seed).choice(recorded.responses.ravel(), size=(groups, n))
        words = f"responses drawn from the run's (mean {recorded.facts.response:.4g} tokens)"
        return Workload(drawn, np.full(groups, prompt), equal), words
    text = f"lognormal:mean={max(1.0, longest / 4):g},sigma=0.8" if known.lengths is None else known.lengths
    law = parse_lengths(text, cap=longest)
    assumed = "assumed " if known.lengths is None else ""
    return Workload.draw(law, groups, n, prompt, recipe.seed, equal), f"{assumed}responses {text}, prompts of {prompt} tokens"


# ── what is shown ────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, found: Found, devices: int, described: str, recipe: OnlineRecipe) -> None:
    console.print(f"{devices} devices, {recipe.samples_per_step} samples a step, {described}")
    console.print(f"{found.candidates} placements, {found.fitting} fit the memory, {found.simulated} simulated")
    console.print(_table("Best placements (predicted)", found.best))
    if found.staler:
        console.print(
            _table("With more staleness, that is samples of older policies (fewer placements simulated)", list(found.staler.values()))
        )
    left_out = [str(k) for k in range(recipe.pipeline.max_staleness + 1, MOST_STALENESS + 1) if k not in found.staler]
    if left_out:
        console.print(f"max_staleness {', '.join(left_out)}: not simulated, a step has too many samples to do so in a minute")
    if found.best[0].memory:
        console.print(memory_table(found.best[0]))


def _table(title: str, predictions: list[Prediction]) -> Any:
    columns = ["devices", "TP", "micro-batch", "concurrent", "staleness", "step s", "idle", "device-h per 1,000 samples"]
    return table(title, columns, [_row(prediction) for prediction in predictions])


def _row(prediction: Prediction) -> list[Cell]:
    recipe = prediction.recipe
    idle = " ".join(f"{group} {share:.0%}" for group, share in prediction.idle.items())
    return [
        placement(recipe), recipe.rollout.tensor_parallel_size, recipe.pipeline.micro_batch_size, recipe.rollout.max_concurrent_requests,
        recipe.pipeline.max_staleness, prediction.step_seconds, idle, prediction.device_hours_per_1000,
    ]  # fmt: skip


def placement(recipe: OnlineRecipe) -> str:
    """Such as `rollout 24 · train 8 (+ score)`: what else lies on a group stands behind it."""
    names = {"rollout": recipe.role_group("rollout"), "train": recipe.role_group("actor")}
    if recipe.score_roles or recipe.snapshot_roles:
        names["score"] = recipe.roles.get("score", "score")
    parts = []
    for group, count in (recipe.devices or {}).items():
        others = [stage for stage, place in names.items() if place == group and stage != group]
        in_parts = " in parts" if names.get("score") == group and recipe.score.zero_stage == 3 else ""
        parts.append(f"{group} {count:g}" + (f" (+ {', '.join(others)})" if others else "") + in_parts)
    return " · ".join(parts)


def memory_table(prediction: Prediction) -> Any:
    rows: list[list[Cell]] = []
    for group in prediction.memory:
        rows += [[f"{group.group}: {item}", size / 1e9] for item, size in group.items.items()]
        rows.append([f"{group.group}: sum, of {group.limit / 1e9:.0f}", group.total / 1e9])
    return table("Memory of the best, GB a GPU", ["", "GB"], rows)


def validation_tables(validation: Validation) -> list[Any]:
    measured, predicted = validation.measured, validation.predicted
    rows: list[list[Cell]] = [["step, seconds", measured.step_seconds, predicted.step_seconds, f"{validation.step_error:+.1%}"]]
    for group, share in measured.idle.items():
        rows.append([f"idle, {group}", share, predicted.idle[group], f"{predicted.idle[group] - share:+.3f}"])
    return [table("Predicted against measured", ["", "measured", "predicted", "difference"], rows)]


# ── the recipe ───────────────────────────────────────────────────────────────────────────────────


def changed_recipe(raw: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """A recipe given as a mapping, with the placement and sizes of a prediction."""
    recipe = prediction.recipe
    changes: dict[str, dict[str, Any]] = {
        "rollout": {
            "tensor_parallel_size": recipe.rollout.tensor_parallel_size,
            "max_concurrent_requests": recipe.rollout.max_concurrent_requests,
        },
        "pipeline": {"micro_batch_size": recipe.pipeline.micro_batch_size, "max_staleness": recipe.pipeline.max_staleness},
    }
    if recipe.score.zero_stage == 3:
        changes["score"] = {"zero_stage": 3}
    changes["rollout"] |= _engine_share(prediction)
    made = raw | {name: (raw.get(name) or {}) | keys for name, keys in changes.items()}
    return made | {"devices": {group: int(count) for group, count in (recipe.devices or {}).items()}, "roles": dict(recipe.roles)}


def _engine_share(prediction: Prediction) -> dict[str, float]:
    """An engine beside others on its GPU may only take what they leave. That of transformers takes what it needs."""
    if prediction.recipe.rollout.engine == "transformers":
        return {}
    for group in prediction.memory:
        if group.group == prediction.recipe.role_group("rollout") and "trained weights" in group.items:
            own = sum(size for item, size in group.items.items() if item in ("engine weights", "KV cache", "engine activations"))
            return {"gpu_memory_utilization": round(own / group.limit, 3)}
    return {}


def _check_writable(path: Path) -> None:
    """Before the search, which takes its time."""
    if path.exists():
        raise UserError(f"--write: {path} exists; name a new file")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--write: {path.parent} is no folder that can be written to")


def _write(path: Path, source: str, recipe: OnlineRecipe, prediction: Prediction) -> None:
    """The keys that the recipe's file, its method and the command line set, and those of the placement."""
    made = changed_recipe(recipe.model_dump(mode="json", exclude_unset=True), prediction)
    parse_recipe(made, source=str(path))
    text = yaml.safe_dump(made, sort_keys=False, allow_unicode=True)
    note = f"# {source}, placed by conveyor plan: predicted step {prediction.step_seconds:.4g} s\n"
    try:
        path.write_text(note + text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write: {path}: {error.strerror}") from None
