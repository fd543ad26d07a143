"""From the sections of any recipe to one that only samples and scores."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.checks import read_model_config
from conveyor.config import LoopRecipe, OnlineRecipe, Recipe, UserError, load_recipe, parse_recipe
from conveyor.config.load import set_key
from conveyor.data.conditions import FILE, read_template
from conveyor.data.tokenizer import check_folder_or_hub_id
from conveyor.run_folder import RunFolder

KEPT = ("seed", "data", "rollout", "score", "evaluate", "rewards", "devices", "roles", "ray", "telemetry")
"""Sections of a recipe that say how to sample and score, beside `model`."""
MICRO_BATCH = "pipeline.micro_batch_size"
"""And this key: samples that a reward model scores at once."""


def sampling_recipe(raw: dict[str, Any], output_dir: str, source: str = "sampling") -> OnlineRecipe:
    """A recipe for `Sampler`: of the given one what says how to sample and score, with the device groups and roles that are of use.

    Rewards may be missing. They are as they are: scales are the training's, and so is a clip of what they scale. A prompt's
    samples, and a greedy one if `evaluate.greedy`, always fit `rollout.max_concurrent_requests`. `rollout.top_p` and `top_k` may be
    anything, as nothing is trained.

    Args:
        raw: sections as a recipe file has them; those not in `KEPT` are left out.
        source: who asks, for messages.

    Raises:
        UserError: a key is unknown, a value has the wrong type or range, or sections contradict each other.
    """
    pipeline = {key: value for key in ("micro_batch_size", "sleep") if (value := (raw.get("pipeline") or {}).get(key)) is not None}
    raw = {key: value for key, value in raw.items() if key in (*KEPT, "model") and value is not None}
    raw |= {"pipeline": pipeline} if pipeline else {}
    raw |= {"method": "reinforce", "output_dir": output_dir, "overwrite": True, "algorithm": {"kl_coef": 0.0}}
    given = raw.get("rollout")
    if given is None or isinstance(given, dict):  # other values are refused below
        raw["rollout"] = {"n_samples_per_prompt": 1, **(given or {}), "dynamic_sampling": False}
        slots = raw["rollout"].get("max_concurrent_requests", 64)
        if type(slots) is int:
            raw["rollout"]["max_concurrent_requests"] = max(slots, 2**20)
    bare = _parsed({**raw, "devices": None, "roles": {}}, source)
    asked = bare.model_dump(mode="json")
    wanted = bare.rollout.n_samples_per_prompt
    if bare.evaluate is not None:
        wanted = max(wanted, bare.evaluate.n_samples_per_prompt) + bare.evaluate.greedy
        asked["evaluate"]["in_bubbles"] = None
    if given is None or isinstance(given, dict):
        asked["rollout"]["max_concurrent_requests"] = max((given or {}).get("max_concurrent_requests", 64), wanted)
    for reward in asked["rewards"]:
        if reward["normalize"] != "none":
            reward |= {"normalize": "none", "clip": None}
    return _parsed({**asked, **_places(raw, bare)}, source)


def _places(raw: dict[str, Any], bare: OnlineRecipe) -> dict[str, Any]:
    roles, devices = raw.get("roles") or {}, raw.get("devices")
    if isinstance(roles, dict):
        rollout = roles.get("rollout", "rollout")
        score = {reward.name: roles.get(reward.name) or roles.get("score", "score") for reward in bare.model_rewards}
        roles = {"rollout": rollout, "actor": rollout, **score}  # there is no actor; its place is nobody's
        if isinstance(devices, dict):
            devices = {group: count for group, count in devices.items() if group in roles.values()}
    return {"roles": roles, "devices": devices}


@dataclass(frozen=True, slots=True)
class Source:
    """What a command is given to sample by: a model, and the recipe that is named or that of the run that MODEL is."""

    model: str
    file: Path
    recipe: Recipe | None
    """None: none is named, and MODEL is no run."""
    sections: dict[str, Any]
    """Those of `KEPT` that the recipe has, and `model`; to be changed."""

    @classmethod
    def read(cls, model: str, recipe: str | None) -> Source:
        """Raises UserError where the recipe cannot be read."""
        of_run = RunFolder(model)
        file = Path(recipe) if recipe else of_run.config
        path = str(of_run.model) if of_run.model.is_dir() else model
        given = load_recipe(file) if recipe or file.is_file() else None
        dumped = {} if given is None else given.model_dump(mode="json", exclude_none=True)
        places = ("devices", "roles") if not isinstance(given, OnlineRecipe | LoopRecipe) else ()
        raw = {key: dumped[key] for key in (*KEPT, "model") if key in dumped and key not in places}
        raw["model"] = {**raw.get("model", {}), "path": path}
        raw["model"].pop("tokenizer", None)
        return cls(path, file, given, raw)

    @property
    def samples(self) -> bool:
        """The recipe's method does, so it says how."""
        return isinstance(self.recipe, OnlineRecipe | LoopRecipe)

    def fit_lengths(self) -> None:
        """Where no recipe says: half of what a small model takes for the prompt, half for the answer."""
        if "rollout" in self.sections:
            return
        check_folder_or_hub_id("MODEL", self.model)
        limit = getattr(read_model_config("MODEL", self.model), "max_position_embeddings", None) or 1024
        self.sections["data"]["max_prompt_length"] = min(512, limit // 2)
        self.sections["rollout"] = {"max_response_length": min(256, limit // 2)}


def named_functions(functions: list[str]) -> list[dict[str, Any]]:
    """Rewards of `path.py:function`s, by the functions' names; of two with one name the files tell them apart."""
    short = [_name(function) for function in functions]
    files = [Path(function.rpartition(":")[0]).stem for function in functions]
    names = [name if short.count(name) == 1 else f"{file}_{name}" for name, file in zip(short, files, strict=True)]
    return [{"name": name, "function": function} for name, function in zip(names, functions, strict=True)]


def _name(function: str) -> str:
    """`path.py:exact` → `exact`"""
    name = function.rpartition(":")[2].rpartition(".")[2]
    return name if name.isidentifier() else "reward"


def add_condition_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--condition", metavar="TEXT", help=f"ask under another condition than {FILE} does, e.g. --condition=-1.0")
    parser.add_argument("--no-condition", action="store_true", help=f"leave the model's {FILE} alone: put prompts to it as they are")


def condition(recipe: OnlineRecipe, known: argparse.Namespace) -> str | None:
    """The template that engines are to see prompts in; says so in one line. None: as they are.

    Raises:
        UserError: the model's condition.json is not what it should be, or prompts are played by a function.
    """
    template = None if known.no_condition else read_template(recipe.model.path, known.condition)
    if template is None:
        return None
    if recipe.rollout.multi_turn is not None:
        raise UserError(f"{recipe.model.path}/{FILE}: rollout.multi_turn.function plays the prompts itself; use --no-condition")
    print(f"{recipe.model.path}/{FILE}: prompts are put as {template!r} (--no-condition: as they are)")
    return template


def lay_over(raw: dict[str, Any], overrides: dict[str, str], doing: str) -> None:
    """`--dotted.key value` pairs of a command that only samples or scores.

    Raises:
        UserError: it has no such key.
    """
    for key, text in overrides.items():
        if key.partition(".")[0] not in (*KEPT, "model") and key != MICRO_BATCH:
            raise UserError(f"--{key}: {doing} has no such key; sections: model, {', '.join(KEPT)}")
        set_key(raw, key, text)


def _parsed(raw: dict[str, Any], source: str) -> OnlineRecipe:
    made = parse_recipe(raw, source, trains=False)
    assert isinstance(made, OnlineRecipe)
    return made
