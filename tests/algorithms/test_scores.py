"""From rewards to a sample's score: known right values (hand-computed), the running statistics against NumPy."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.algorithms.scores import RewardScale, Running, overlong_penalty, sample_score, shaped
from conveyor.config import sections

EXACT = sections.Reward(name="exact", function="a.py:b")
STYLE = sections.Reward(name="style", model="judge", weight=0.5)


def score(rewards, given=(EXACT, STYLE), scales=None, truncated=False, length=5, limit=10, **algorithm):
    settings = sections.Algorithm(**algorithm)
    return sample_score(rewards, given, scales or {}, truncated=truncated, length=length, algorithm=settings, max_response_length=limit)


def test_case_25_a_row_uses_the_rewards_that_apply():
    assert score({"exact": 2.0, "style": 3.0}) == 3.5
    assert score({"exact": 2.0, "style": None}) == 2.0
    assert score({"exact": None, "style": 3.0}) == 1.5
    assert score({"exact": 2.0}) == 2.0
    assert score({"exact": None, "style": None}, missing_eos_penalty=1.0, truncated=True) is None


def test_penalties_are_taken_off():
    assert score({"exact": 2.0}, missing_eos_penalty=0.75, truncated=True) == 1.25
    assert score({"exact": 2.0}, missing_eos_penalty=0.75) == 2.0
    # 4 of the last 5 tokens used: 4/5 of the penalty
    assert score({"exact": 2.0}, length=9, overlong_buffer=5, overlong_penalty=0.5) == pytest.approx(1.6)
    both = score({"exact": 2.0}, length=10, truncated=True, missing_eos_penalty=0.75, overlong_buffer=5, overlong_penalty=0.5)
    assert both == pytest.approx(0.75)


def test_without_rewards_the_score_is_zero_less_penalties():
    """Distillation."""
    assert score({}, given=()) == 0.0
    assert score({}, given=(), truncated=True, missing_eos_penalty=0.75) == -0.75


def test_scales_are_of_single_rewards():
    found = score({"exact": 3.0, "style": 3.0}, scales={"style": RewardScale(1.0, 4.0)})
    assert found == pytest.approx(3 + 0.5 * 0.5)


@pytest.mark.parametrize(("length", "wanted"), [(1, 0.0), (75, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (99, 0.95), (100, 1.0), (120, 1.0)])
def test_overlong_penalty_by_hand(length, wanted):
    """DAPO eq. 13 with L_max = 100 and L_cache = 20."""
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(wanted)
    assert overlong_penalty(length, 100, 20, 3.0) == pytest.approx(3 * wanted)


def test_shaped_by_hand():
    clipped = sections.Reward(name="r", model="m", clip=1.5)
    assert shaped(None, clipped, RewardScale(0.0, 1.0)) is None
    assert shaped(7.0, EXACT, None) == 7.0
    assert shaped(7.0, clipped, None) == 1.5 and shaped(-7.0, clipped, None) == -1.5
    assert shaped(7.0, EXACT, RewardScale(3.0, 2.0)) == pytest.approx(2.0)
    assert shaped(7.0, clipped, RewardScale(3.0, 2.0)) == 1.5
    assert shaped(4.0, clipped, RewardScale(3.0, 2.0)) == pytest.approx(0.5)
    assert shaped(7.0, EXACT, RewardScale(3.0, 0.0)) == 0.0


@given(values=st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=30), cut=st.integers(0, 30))
def test_running_statistics_are_those_of_all_values_and_survive_json(values, cut):
    running = Running()
    running.add(values[:cut])
    running = Running.load(json.loads(json.dumps(running.state())))
    running.add(values[cut:])
    scale = running.scale()
    assert scale.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert scale.std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


def test_running_statistics_of_few_or_equal_values():
    running = Running()
    assert running.scale() is None
    running.add([0.1])
    assert running.scale() is None
    running.add([0.1, 0.1])
    assert running.scale() == RewardScale(0.1, 0.0)
    assert shaped(0.1, EXACT, running.scale()) == 0.0


def test_a_clip_is_for_what_is_normalised() -> None:
    section = sections.Reward(name="r", function="f.py:f", normalize="running", clip=1.0)
    assert shaped(35.0, section, None) == 35.0, "no scale yet"
    assert shaped(35.0, section, RewardScale(20.0, 5.0)) == 1.0
    assert shaped(35.0, section.model_copy(update={"normalize": "none"}), None) == 1.0
