"""What an engine is started with beside what the recipe says."""

from typing import Any

import pytest

from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.workers.start import engine_settings


def recipe(**rollout: Any) -> OnlineRecipe:
    made = parse_recipe({
        "method": "grpo", "output_dir": "x", "model": {"path": "m"}, "data": {"path": "d"},
        "rewards": [{"name": "right", "function": "f.py:f"}], "rollout": {"gpu_memory_utilization": 0.8, **rollout},
    })  # fmt: skip
    assert isinstance(made, OnlineRecipe)
    return made


@pytest.mark.parametrize(
    ("given", "devices", "sleeps", "sleep", "share"),
    [
        ({}, 4, False, 0, 0.8),
        ({"sleep": 2}, 4, True, 2, 0.8),
        ({}, 2, True, 1, 0.8),
        ({"sleep": 0}, 2, True, 0, 0.8),
        ({}, 0.5, True, 1, 0.4),
        ({}, 0.25, False, 0, 0.2),
    ],
)
def test_sleep_and_memory_by_the_engines_group(given: dict[str, Any], devices: float, sleeps: bool, sleep: int, share: float) -> None:
    """Fractions of a GPU have their part of its memory; roles on the same group take turns, each with all of it."""
    settings = engine_settings(recipe(**given), devices, sleeps=sleeps)
    assert (settings.sleep, settings.gpu_memory_utilization) == (sleep, pytest.approx(share))
