"""docs/loops.md says what the code does: its settings, metrics, recipe, and how its files are read by others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.config import LoopRecipe, parse_recipe, sections
from conveyor.config.describe import keys
from conveyor.config.loops import LOOP_RECIPES
from conveyor.data.pairs import load_pairs
from conveyor.data.sft import load_sft
from conveyor.data.tokenizer import load_tokenizer
from conveyor.loops.selection import as_completions, as_pairs, selected_rows
from tests.loops.conftest import Finished, Make, Run
from tests.loops.test_selection import line

PAGE = (Path(__file__).parents[2] / "docs" / "loops.md").read_text(encoding="utf-8")
METHODS = [str(recipe.model_fields["method"].annotation.__args__[0]) for recipe in LOOP_RECIPES]  # type: ignore[union-attr]


def table(start: str) -> dict[str, list[str]]:
    """Of the first table after a text: the names in the first cell of each row → its other cells."""
    rows = PAGE.split(start, 1)[1].split("\n\n| ", 1)[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: more for first, *more in cells for name in re.findall(r"`([^`]+)`", first)}


def test_every_method_and_setting_is_there_with_its_default() -> None:
    assert set(table("samples the next round.")) == set(METHODS)
    told = table("\n## Settings")
    known = {key.name: key.default for method in METHODS for key in keys(method) if key.name.startswith(("rounds.", "select."))}
    assert {name: cells[0].strip("`") for name, cells in told.items()} == known
    for method in METHODS:
        for key in keys(method):
            if key.name.startswith("select."):
                assert f"`{method}`" in told[key.name][1]


def test_every_metric_of_a_round_is_there(make_loop: Make, run: Run, tmp_path: Path, loop_data: Path) -> None:
    told = set(table("also line 0, of the first policy:"))
    changes: dict[str, Any] = {"rounds.count": 1, "data.eval_path": str(loop_data / "held_out.jsonl")}
    named: set[str] = set()
    for method in ("rejection_sampling", "iterative_dpo"):
        done: Finished = run(make_loop(method, tmp_path / method, changes))
        full = json.loads(done.run.metrics.read_text().splitlines()[1])
        named |= {re.sub(r"^(train|eval)/.*", r"\1/…", name).replace("reward/low", "reward/NAME") for name in full}
    assert named == told


def test_the_recipe_of_the_page_is_one() -> None:
    recipe = parse_recipe(yaml.safe_load(PAGE.split("```yaml\n")[1].split("```")[0]))
    assert isinstance(recipe, LoopRecipe) and recipe.rounds.count == 3


@pytest.mark.parametrize("method", ["rejection_sampling", "iterative_dpo"])
def test_what_is_selected_is_data_for_other_methods(make_loop: Make, tmp_path: Path, method: str) -> None:
    """Where a text is its tokens again and ended by itself, the ids are those that the loop learns."""
    recipe = make_loop(method, tmp_path / "run", {"rollout.n_samples_per_prompt": 2})
    tokenizer = load_tokenizer(recipe.model)
    prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": "p0"}], add_generation_prompt=True)["input_ids"]
    group = line([1.0, 0.0]) | {"prompt_ids": prompt_ids}
    for sample in group["samples"]:
        sample["response_ids"] = [*tokenizer(sample["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rows = list(selected_rows(recipe, 0, [group]))
    file = tmp_path / "selected.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = sections.Data(path=str(file))
    if method == "rejection_sampling":
        read, own = load_sft(data, tokenizer), [item.sample for item in as_completions(rows, file)]
    else:
        pairs = [*load_pairs(data, tokenizer), *as_pairs(rows, file)]
        read, own = [[pair.chosen, pair.rejected] for pair in pairs]
    for one, other in zip(read, own, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()


def test_best_of_n_from_samples_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PAGE.split("```python\n")[1].split("```")[0]
    folder = tmp_path / "runs/generate/quickstart_sft"
    folder.mkdir(parents=True)
    said = [(1, "a", 0.0, "stop"), (1, "b", 2.0, "length"), (1, "c", 1.0, "stop"), (2, "d", None, "stop"), (3, "e", 1.0, "stop")]
    names = ("row", "completion", "score", "finish_reason")
    rows = [{"prompt": f"p{row[0]}", **dict(zip(names, row, strict=True))} for row in said]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/loops.md", "exec"), {})
    best = [json.loads(row) for row in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert best == [{"prompt": "p1", "completion": "c"}, {"prompt": "p3", "completion": "e"}]
