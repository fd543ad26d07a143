"""docs/rewards.md: its recipes are sound, its functions run, and it tells of every verifier and setting."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from conveyor.config import UserError
from conveyor.config.sections import Reward
from conveyor.rewards import load_function
from conveyor.rewards.verifiers import HOMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(f"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_its_recipes_are_sound():
    rewards = [Reward(**raw) for block in blocks("yaml") for raw in yaml.safe_load(block)["rewards"]]
    assert len(rewards) > 10
    for reward in rewards:
        if reward.function is not None and reward.function.startswith("conveyor."):
            try:
                load_function(reward.function, reward.name, reward.arguments)
            except UserError as error:
                assert "the sandbox for programs cannot be set up" in str(error)  # tests/rewards/test_sandbox.py is skipped there
        elif reward.function is not None:
            assert (ROOT / reward.function.split(":")[0]).is_file()


def test_its_function_runs():
    space: dict = {}
    exec(blocks("python")[0], space)
    assert space["reward"](prompts=["", "", ""], completions=["4", [{"content": "5"}], "6"], answer=["4", "4", None]) == [1.0, 0.0, None]


def test_it_tells_of_everything():
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) >= set(HOMES)
    settings = PAGE.split("## Settings")[1].split("## ")[0]
    assert set(Reward.model_fields) - {"model", "function", "url"} == set(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE))
