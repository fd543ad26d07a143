"""Recipes for the planner's tests: nothing they name is read."""

from typing import Any

from conveyor.config import OnlineRecipe, parse_recipe


def raw(method: str = "ppo", **sections: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "method": method,
        "output_dir": "runs/x",
        "model": {"path": "some/model", "dtype": "bfloat16"},
        "data": {"path": "prompts.jsonl", "max_prompt_length": 512},
        "rewards": [{"name": "judge", "model": "some/judge"}],
        "rollout": {"max_response_length": 1024},
        "train": {"rollout_batch_size": 32, "zero_stage": 3},
        "pipeline": {"micro_batch_size": 8},
    }
    for name, keys in sections.items():
        made[name] = {**made.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return made


def recipe(method: str = "ppo", **sections: Any) -> OnlineRecipe:
    made = parse_recipe(raw(method, **sections))
    assert isinstance(made, OnlineRecipe)
    return made
