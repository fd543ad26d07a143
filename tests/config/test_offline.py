"""Recipes of the methods that learn from a fixed dataset: what they leave unsaid, what they may not say."""

from typing import Any, get_args

import pytest

from conveyor.config import OfflineRecipe, UserError, load_recipe, parse_recipe
from conveyor.config.offline import ConditionalSftRecipe, DpoRecipe, PairLoss
from tests.config.offline_cases import FUNCTION, OFFLINE, conditional, dpo, offline


@pytest.mark.parametrize("method", sorted(OFFLINE))
def test_offline_methods_need_nothing_but_a_model_and_data(method: str) -> None:
    made = parse_recipe(offline(method))
    assert isinstance(made, OfflineRecipe) and made.method == method
    assert parse_recipe(made.model_dump(mode="json")) == made


def test_what_a_loss_of_pairs_leaves_unsaid() -> None:
    """SimPO's β is a scale of rewards; rDPO and EXO need ε; IPO, SimPO and ORPO average; ORPO, CPO and SLiC have an NLL."""
    used = {}
    for loss in get_args(PairLoss):
        made = parse_recipe(dpo(loss=loss))
        assert isinstance(made, DpoRecipe)
        of = made.dpo
        used[loss] = (of.beta_used, of.smoothing_used, of.normalizes, of.nll_used, of.needs_reference)
    plain = (0.1, 0.0, False, 0.0, True)
    assert {loss: values for loss, values in used.items() if values != plain} == {
        "ipo": (0.1, 0.0, True, 0.0, True),
        "robust": (0.1, 0.1, False, 0.0, True),
        "exo_pair": (0.1, 0.001, False, 0.0, True),
        "simpo": (2.0, 0.0, True, 0.0, False),
        "orpo": (0.1, 0.0, True, 1.0, False),
        "cpo": (0.1, 0.0, False, 1.0, False),
        "slic": (0.1, 0.0, False, 1.0, False),
    }
    given = parse_recipe(dpo(loss="cpo", nll_coef=0, beta=0.3, label_smoothing=0.2))
    assert isinstance(given, DpoRecipe) and (given.dpo.nll_used, given.dpo.beta_used, given.dpo.smoothing_used) == (0.0, 0.3, 0.2)


def test_a_single_row_is_enough_for_kto_without_its_kl() -> None:
    assert parse_recipe(offline("kto", kto={"loss": "apo_zero_unpaired"}, train={"train_batch_size": 1}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "1.0"),
        ({"target": 2, "decimals": 0}, "2"),
        ({"target": -0.26, "decimals": 2}, "-0.26"),
        ({"kind": "class", "classes": {"a": {"text": "A", "weight": 0.1}, "b": {"text": "B"}}}, "B"),
        ({"kind": "class", "classes": {"a": {"text": "A", "weight": 0.1}, "b": {"text": "B"}}, "target": "a"}, "A"),
    ],
)
def test_the_condition_of_inference(settings: dict[str, Any], text: str) -> None:
    made = parse_recipe(conditional(**settings))
    assert isinstance(made, ConditionalSftRecipe) and made.condition.target_text == text


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (dpo(loss="dopo"), "dpo.loss: Input should be 'sigmoid'"),
        (dpo(label_smoothing=0.5), "dpo.label_smoothing: Input should be less than 0.5"),
        (dpo(beta=0), "dpo.beta: Input should be greater than 0"),
        (offline("sft", dpo={}), "dpo: unknown key"),
        (offline("sft", reference={"path": "r"}), "reference: unknown key"),
        (offline("sft", rewards=[FUNCTION]), "rewards: unknown key"),
        (offline("sft", lora={"rank": 0}), "lora.rank: Input should be greater than 0"),
        (offline("reward_model", reward_model={"label_smoothing": -0.1}), "reward_model.label_smoothing: Input should be greater than"),
        (offline("kto", kto={"desirable_weight": 0}), "kto.desirable_weight: Input should be greater than 0"),
        (offline("bco", bco={"shift": 1}), "bco.shift: unknown key"),
    ],
)
def test_bad_settings_of_offline_methods(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(raw)
    assert str(caught.value).startswith(f"recipe: {line}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", get_args(PairLoss))
def test_the_tiny_recipe_takes_every_loss(loss: str) -> None:
    assert isinstance(load_recipe("recipes/tiny/dpo.yaml", {"dpo.loss": loss}), DpoRecipe)
