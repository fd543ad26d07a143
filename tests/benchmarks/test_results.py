"""The helpers of the benchmarks; what they measure is no test's business."""

import json
from pathlib import Path

import pytest

from benchmarks.results import Result, markdown, median, write


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


@pytest.mark.parametrize(("value", "at_most", "holds"), [(3.0, False, True), (2.9, False, False), (3.0, True, True), (3.1, True, False)])
def test_a_target_is_a_lower_bound_unless_it_says_otherwise(value: float, at_most: bool, holds: bool) -> None:
    assert Result("n", "what", value, 3.0, at_most=at_most).holds is holds


def test_a_benchmark_that_did_not_run_keeps_its_entries(tmp_path: Path) -> None:
    where = {"load_before": 0.25}
    write(tmp_path, [Result("one", "the first", 1.0, 2.0), Result("two", "the second", 1.0, 2.0, at_most=True)], where, 1.0)
    write(tmp_path, [Result("one", "the first", 2.5, 2.0, details={"all": [2.5]})], where, 1.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "one": {"value": 2.5, "target": 2.0, "holds": True},
        "two": {"value": 1.0, "target": 2.0, "holds": True},
    }
    assert json.loads((tmp_path / "details.json").read_text())["one"]["all"] == [2.5]
    assert "| the first | 2.5 | ≥ 2 | yes | 0.2 |" in markdown(tmp_path)
