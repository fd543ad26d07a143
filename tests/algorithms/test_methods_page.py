"""docs/methods.md names every method, estimator, loss and aggregation, and tests that exist."""

import re
from pathlib import Path
from typing import get_args

import pytest

from conveyor.config import presets, sections

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
TESTS = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))


def first_cells(heading):
    """Names in code in the first column of the tables of a chapter."""
    chapter = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {name for line in chapter.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Methods", set(presets.METHOD_DEFAULTS)),
        ("Advantage estimators", set(get_args(sections.AdvantageEstimator))),
        ("Policy losses", {*get_args(sections.PolicyLoss), *get_args(sections.Aggregation)}),
    ],
)
def test_every_name_has_a_row(heading, names):
    assert first_cells(heading) == names


def test_the_tests_that_show_a_method_exist():
    named = set(re.findall(r"\b(test_\w+)(?!\w|\.py)", PAGE))
    assert len(named) > 15
    assert not [name for name in named if f"def {name}" not in TESTS]
