"""Ready-made reward functions, named in a recipe as `conveyor.rewards.verifiers:NAME`; docs/rewards.md tells of each.

What a function needs beyond Conveyor itself is imported when the function is, so a package that is missing is
one line when the recipe is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from conveyor.config import UserError

HOMES = {
    "exact_answer": "texts",
    "format": "texts",
    "length_penalty": "texts",
    "regex": "texts",
    "math_verify": "mathematics",
    "reasoning_gym": "gym",
    "sentiment": "mood",
    "code": "programs",
}
"""Verifier → the module it is in."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(name)
    try:
        module = importlib.import_module(f"{__name__}.{HOMES[name]}")
    except ModuleNotFoundError as error:
        raise UserError(f"the verifier {name} needs the package {error.name}: pip install -e '.[verifiers]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(HOMES)
