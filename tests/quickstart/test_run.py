from pathlib import Path

import pytest

from conveyor.config import UserError, load_recipe
from conveyor.quickstart.memory import PeakMemory
from conveyor.quickstart.run import RECIPES, WRITTEN_FOR, _claim


def test_every_recipe_is_valid_and_stays_in_the_quickstarts_folder():
    recipes = sorted(RECIPES.glob("*.yaml"))
    assert [path.stem for path in recipes] == ["ppo", "reward_model", "sft"]
    for path in recipes:
        recipe = load_recipe(path)
        for place in (recipe.output_dir, recipe.model.path, recipe.data.path):
            assert place.startswith(WRITTEN_FOR + "/")


def test_a_rerun_replaces_what_the_quickstart_made_and_nothing_else(tmp_path):
    folder = tmp_path / "quickstart"
    _claim(folder)
    (folder / "sft").mkdir()
    (folder / "sft" / "old").write_text("old")
    (folder / "summary.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    _claim(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".quickstart", "notes.txt"]


def test_somebody_elses_folder_is_refused_and_left_alone(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UserError, match="no quickstart made"):
        _claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        _claim(Path(tmp_path / "taken"))


def test_peak_memory_sees_what_was_held():
    with PeakMemory() as small:
        pass
    held = b"x" * (200 * 2**20)
    with PeakMemory() as large:
        pass
    assert len(held) == 200 * 2**20
    assert large.gib - small.gib > 0.15
