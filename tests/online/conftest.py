"""Whole runs on tiny models, on the session's Ray, with one engine for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conveyor.checks import check_online
from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.pipeline.loop import run_placed
from conveyor.run_folder import RunFolder
from conveyor.workers.placement import Placement
from tests.conftest import ENGINE_ROLLOUT
from tests.kept import KeptPlacement, KeptWorkers

REWARD_FUNCTION = '''
def vowels(prompts, completions, answer, **columns):
    """Share of vowels, so that almost every sample has its own reward."""
    return [sum(c in "aeiou" for c in text) / 10 + 0.01 * len(text) + 0.1 * wanted for text, wanted in zip(completions, answer)]
'''


Make = Callable[..., OnlineRecipe]
Run = Callable[..., "Finished"]


@dataclass(frozen=True)
class Finished:
    """A run that is over."""

    folder: RunFolder

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    def weights(self, of: str = "model") -> dict[str, torch.Tensor]:
        return load_file(self.folder.path / of / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative, over the whole vector of parameters."""
    assert one.keys() == other.keys()
    a, b = (torch.cat([tensor.double().flatten() for _, tensor in sorted(weights.items())]) for weights in (one, other))
    return float((a - b).norm() / a.norm())


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i * 37 % 101}", "answer": i % 3}) + "\n" for i in range(18)))
    (path.parent / "rewards.py").write_text(REWARD_FUNCTION)
    return path


@pytest.fixture(scope="session")
def make_in(tiny_policy: Path, tiny_reward_model: Path, prompts_file: Path) -> Make:
    """`make_in(folder, method, name, {"dotted.key": value})`; the run's folder is folder/name."""

    def make(folder: Path, method: str, name: str, changes: dict[str, Any] | None = None) -> OnlineRecipe:
        raw: dict[str, Any] = {
            "method": method,
            "output_dir": str(folder / name),
            "seed": 3,
            "model": {"path": str(tiny_policy)},
            "data": {"path": str(prompts_file), "max_prompt_length": 32},
            "rewards": [
                {"name": "vowels", "function": f"{prompts_file.parent / 'rewards.py'}:vowels"},
                {"name": "judge", "model": str(tiny_reward_model), "weight": 0.5},
            ],
            "rollout": {
                "n_samples_per_prompt": 4 if method == "grpo" else 2,
                "max_response_length": ENGINE_ROLLOUT.max_response_length,
                "max_concurrent_requests": ENGINE_ROLLOUT.max_concurrent_requests,
            },
            "train": {"rollout_batch_size": 6, "steps": 3, "learning_rate": 1e-3},
            "pipeline": {"micro_batch_size": 5},
            "devices": {"rollout": 1, "score": 1, "train": 1},
        }
        if method == "ppo":
            raw["critic"] = {"path": str(tiny_reward_model)}
        for key, value in (changes or {}).items():
            *sections, last = key.split(".")
            place = raw
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        recipe = parse_recipe(raw)
        assert isinstance(recipe, OnlineRecipe)
        return recipe

    return make


@pytest.fixture
def make_recipe(make_in: Make, tmp_path: Path) -> Make:
    """`make_recipe(method, name, {"dotted.key": value})`"""
    return partial(make_in, tmp_path)


@pytest.fixture(scope="session")
def start(engine: Any, kept: KeptWorkers) -> Run:
    """`start(recipe)` runs it with the session's engine, from whatever weights the last run left there. Its workers are made anew in
    processes that have imported everything; with `cold`, in processes of its own, as a user's are."""

    def go(recipe: OnlineRecipe, cold: bool = False) -> Finished:
        order = check_online(recipe)
        assert recipe.devices is not None
        devices = {group: count for group, count in recipe.devices.items() if group != "rollout"}
        with Placement.create(devices, recipe.ray) if cold else KeptPlacement(kept, devices) as placement:
            run_placed(recipe, order, placement, engines=[engine], gradient_folder=Path(recipe.output_dir) / "gradient")
        return Finished(RunFolder(recipe.output_dir))

    return go


@pytest.fixture
def run(start: Run, restored: None) -> Run:
    return start
