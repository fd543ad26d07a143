"""Every recipe in the repository is a valid one, and the data that comes along says the same in every form."""

from pathlib import Path

import numpy as np
import pytest

from conveyor.config import load_recipe
from conveyor.config.recipe import METHODS
from conveyor.config.sections import Data
from conveyor.data.pairs import load_pairs
from conveyor.data.sft import load_sft
from conveyor.data.unpaired import load_unpaired
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
FORMS = ROOT / "examples" / "smollm2" / "data"


def test_there_are_recipes():
    names = {str(path.relative_to(ROOT / "recipes")) for path in RECIPES}
    assert {f"smollm2_{method}.yaml" for method in ("sft", "dpo", "kto", "grpo")} | {"llama3_8b_ppo_8gpu.yaml"} <= names
    assert {f"tiny/{method}.yaml" for method in METHODS} <= names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_parses(path):
    recipe = load_recipe(path)
    for reward in getattr(recipe, "rewards", ()):
        if reward.function is not None and ".py:" in reward.function:
            assert (ROOT / reward.function.partition(":")[0]).is_file()
    if recipe.data.path.startswith("examples/"):
        assert (ROOT / recipe.data.path).is_file()


def sft(data, tokenizer):
    return load_sft(data, tokenizer)


def dpo(data, tokenizer):
    return [sample for pair in load_pairs(data, tokenizer) for sample in (pair.chosen, pair.rejected)]


def kto(data, tokenizer):
    labelled = load_unpaired(data, tokenizer)
    assert [row.label for row in labelled].count(True) == 11
    return [row.sample for row in labelled]


@pytest.mark.parametrize(("samples", "forms", "count"), [(sft, 3, 12), (dpo, 3, 24), (kto, 2, 16)])
def test_the_rows_of_every_form_say_the_same(samples, forms, count):
    tokenizer, files = tiny_tokenizer(), sorted(FORMS.glob(f"{samples.__name__}_*.jsonl"))
    assert len(files) == forms
    # An earlier answer of the assistant is learnt where it stands in `messages`, and where a prompt has it with this setting only.
    first, *others = [samples(Data(path=str(file), train_on="assistant"), tokenizer) for file in files]
    assert len(first) == count
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert np.array_equal(one.ids, same.ids)
            assert np.array_equal(one.mask, same.mask)
