"""Rollout functions: found or refused in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conveyor.config import OnlineRecipe, UserError
from conveyor.config.load import parse_recipe
from conveyor.episodes import load_rollout_function

PLAYS = Path(__file__).with_name("plays.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no missing"),
        ("plain", "is not an async function"),
        ("no_generate", "takes no argument generate"),
        ("by_place", "takes prompt by position only"),
        ("wants_more", "the function asks for the column level; the data has answer"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_rollout_function(f"{PLAYS}:{name}", "rollout.multi_turn.function", ["answer"])
    assert str(caught.value).startswith("rollout.multi_turn.function: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["play", "narrow", "callable_object"])
def test_functions_that_can(name: str) -> None:
    assert callable(load_rollout_function(f"{PLAYS}:{name}", "k", ["answer"]))


def test_the_functions_process_is_light() -> None:
    code = "import conveyor.episodes.child, sys; print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_recipe_of_the_page_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "multi_turn.md").read_text(encoding="utf-8")
    recipe = parse_recipe(next(raw for raw in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)) if "method" in raw))
    assert isinstance(recipe, OnlineRecipe) and recipe.rollout.multi_turn is not None
    load_rollout_function(recipe.rollout.multi_turn.function, "k", ["answer"])
