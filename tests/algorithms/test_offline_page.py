"""docs/offline.md names every offline method and loss, and says of each loss what the recipe does by default."""

import re
from pathlib import Path
from typing import get_args

import pytest

from conveyor.config.offline import OFFLINE_RECIPES, REFERENCE_FREE, Dpo, Kto, PairLoss
from conveyor.config.offline_rules import SMOOTHED

PAGE = (Path(__file__).parents[2] / "docs" / "offline.md").read_text(encoding="utf-8")
PAIR_LOSSES = get_args(PairLoss)


def rows(heading):
    """Name → the rest of its row, of the table of a chapter."""
    chapter = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = [re.match(r"\| `(\w+)` \|(.*)", line) for line in chapter.splitlines()]
    return {row[1]: row[2] for row in found if row}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Methods", {get_args(recipe.model_fields["method"].annotation)[0] for recipe in OFFLINE_RECIPES}),
        ("Losses of pairs", set(PAIR_LOSSES)),
        ("Losses of single completions", {*get_args(Kto.model_fields["loss"].annotation), "bco"}),
    ],
)
def test_every_name_has_a_row(heading, names):
    assert set(rows(heading)) == names


@pytest.mark.parametrize(
    ("says", "losses"),
    [
        ("no reference", set(REFERENCE_FREE)),
        ("averaged over tokens", {loss for loss in PAIR_LOSSES if Dpo(loss=loss).normalizes}),
        ("`nll_coef` 1", {loss for loss in PAIR_LOSSES if Dpo(loss=loss).nll_used == 1}),
        ("`margin`", {loss for loss in PAIR_LOSSES if loss in ("simpo", "slic")}),
        ("ε|`sigmoid`", set(SMOOTHED) - {"aot_unpaired"}),  # whose logistic loss is that of the row above it
    ],
)
def test_it_says_of_the_right_losses(says, losses):
    assert {loss for loss, row in rows("Losses of pairs").items() if re.search(says, row)} == losses


def test_its_defaults_are_those_of_the_recipe():
    for loss, row in rows("Losses of pairs").items():
        smoothing = re.search(r"ε = ([\d.]+)", row)
        assert Dpo(loss=loss).smoothing_used == (float(smoothing[1]) if smoothing else 0)
        beta = re.search(r"β = (\d+)", row)
        assert Dpo(loss=loss).beta_used == (float(beta[1]) if beta else 0.1)
