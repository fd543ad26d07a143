"""The world of one seed: its prompts, and a policy that was fine-tuned on demonstrations of which half are sloppy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.config import OfflineRecipe, parse_recipe
from conveyor.offline.run import run_offline
from conveyor.quickstart import task
from conveyor.quickstart.base_model import make_base_model

PROMPTS = 512
"""Of the budget,"""
SAMPLES = 8
"""each with so many samples: 4,096 judged samples a method."""
HELD_OUT = 300
MAX_PROMPT, MAX_RESPONSE = 32, 12
"""Tokens."""

Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """Folders of one seed."""

    path: Path
    seed: int

    @property
    def sft(self) -> Path:
        return self.path / "sft" / "model"

    def data(self, name: str) -> Path:
        return self.path / "data" / f"{name}.jsonl"

    def write(self, name: str, rows: Iterable[Row]) -> None:
        self.data(name).parent.mkdir(parents=True, exist_ok=True)
        self.data(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def train(self, name: str, raw: dict[str, Any]) -> None:
        """Run an offline method in this process; its model is in NAME/model."""
        common = {"seed": self.seed, "output_dir": str(self.path / name), "overwrite": True}
        recipe = parse_recipe({**common, "model": {"path": str(self.sft)}, **raw}, source=name)
        assert isinstance(recipe, OfflineRecipe)
        run_offline(recipe)


def make_policy(world: World) -> None:
    """Write the world's data and fine-tune a new model."""
    sizes = task.Sizes(heldout=HELD_OUT, demonstrations=12_800, pairs=0, pairs_heldout=0, prompts=PROMPTS, judged=0, steps=0)
    rows = task.generate(100 + world.seed, sizes)
    for name in ("heldout", "sft", "prompts"):
        world.write(name, rows[name])
    make_base_model(world.path / "base", (f"{row['prompt']}\n{row['completion']}" for row in rows["sft"]), world.seed)
    world.train("sft", {
        "method": "sft", "model": {"path": str(world.path / "base")}, "data": {"path": str(world.data("sft")), "max_length": 128},
        "train": {"train_batch_size": 8, "micro_batch_size": 8, "learning_rate": 2e-3, "lr_schedule": "linear", "warmup_ratio": 0.05},
    })  # fmt: skip
