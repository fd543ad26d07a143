"""Every recipe in the repository is a valid one."""

from pathlib import Path

import pytest

from conveyor.config import load_recipe

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def test_there_are_recipes():
    assert {"smollm2_grpo.yaml", "llama3_8b_ppo_8gpu.yaml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_parses(path):
    recipe = load_recipe(path)
    for reward in getattr(recipe, "rewards", ()):
        if reward.function is not None and ".py:" in reward.function:
            assert (ROOT / reward.function.partition(":")[0]).is_file()
