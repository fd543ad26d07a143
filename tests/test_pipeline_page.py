"""docs/pipeline.md says what the simulator and the repository say."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from conveyor.report.causes import CAUSES

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
PAGE = (DOCS / "pipeline.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pipeline_page", DOCS / "make_pipeline_page.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def rows(table: str) -> list[list[str]]:
    """Its cells, without the head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("name", ["schedules", "formulas", "sizes", "waves", "merging"])
def test_tables_are_what_the_simulator_says(maker: ModuleType, name: str) -> None:
    assert maker.block(PAGE, name) == maker.BLOCKS[name](), f"run: PYTHONPATH=. python docs/make_pipeline_page.py {name}"


@pytest.mark.parametrize("name", ["formulas", "sizes"])
def test_formulas_hold_exactly(maker: ModuleType, name: str) -> None:
    assert {row[-1] for row in rows(maker.block(PAGE, name))} == {"+0.0%"}


def test_the_flow_shop_by_hand(maker: ModuleType) -> None:
    assert maker.flow_shop(10, 6, 1.5, 2.5) == pytest.approx(1 + 0.9 * 6)
    assert maker.flow_shop(1, 6, 1.5, 2.5) == pytest.approx(10)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_expected_longest_is_that_of_many_draws(maker: ModuleType, sigma: float) -> None:
    drawn = np.random.default_rng(0).lognormal(-(sigma**2) / 2, sigma, size=(20_000, 64)).max(axis=1)
    assert maker.expected_longest(sigma, 64) == pytest.approx(drawn.mean(), rel=0.02)
    assert maker.expected_longest(sigma, 1) == pytest.approx(1, rel=1e-3)


def test_the_rule_for_the_tail_is_near_the_simulator(maker: ModuleType) -> None:
    found = rows(maker.block(PAGE, "tail"))
    assert len(found) == 9
    assert all(abs(float(row[-1].strip("%"))) <= 15 for row in found)
    run, workload = maker.sampling_only(0.5, 1, "prompt", steps=40)
    simulated = run.steady().step_seconds / (workload.facts.response * maker.SECONDS_A_TOKEN)
    assert simulated == pytest.approx(maker.sampling_rule(0.5, 1), rel=0.1)


def test_every_prediction_is_there_and_named_one(maker: ModuleType) -> None:
    block = maker.block(PAGE, "predictions")
    heads = [line for line in block.splitlines() if line.startswith("**")]
    assert len(heads) == 4 and all(head.startswith("**Prediction: ") for head in heads)
    expected = [[law, way] for law in maker.LAWS for way in maker.WAYS]
    for table in block.split("**Prediction: ")[1:]:
        assert [row[:2] for row in rows(table)] == expected


@pytest.mark.long
@pytest.mark.slow
def test_a_prediction_is_what_the_simulator_says(maker: ModuleType) -> None:
    """Not to the last digit: small changes of a cost need not have all of them made anew."""
    table = maker.block(PAGE, "predictions").split("**Prediction: ")[1]
    written = {row[1]: float(row[6]) for row in rows(table) if row[0] == "short"}
    found = {way: one.step_seconds for way, one in maker.predicted("8b", 32, "short").items()}
    assert found == pytest.approx(written, rel=0.1)


def test_what_the_page_refers_to_exists() -> None:
    linked = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert not [target for target in linked if not (DOCS / target).exists()]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(tests) > 10
    assert not [name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")]
    assert not [cause for cause in CAUSES if f"| {cause} |" not in PAGE]


def test_pictures_are_those_of_the_page_and_small(maker: ModuleType) -> None:
    shown = set(re.findall(r"!\[[^]]+\]\(pipeline/(\w+)\.png\)", PAGE))
    assert shown == set(maker.SCHEDULES) == {path.stem for path in (DOCS / "pipeline").iterdir()}
    assert all(path.stat().st_size < 150_000 for path in (DOCS / "pipeline").iterdir())
