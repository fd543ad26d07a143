"""Pages made from the code are current."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_recipe_keys_is_current():
    spec = importlib.util.spec_from_file_location("make_recipes_page", DOCS / "make_recipes_page.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.page() == (DOCS / "recipes.md").read_text(encoding="utf-8"), "run: python docs/make_recipes_page.py"
