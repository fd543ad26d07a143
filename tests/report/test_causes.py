"""Idle time by cause against answers worked out by hand, and for whatever events: every idle second has one cause."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.report.causes import CAUSES, idle_by_cause, idle_spells
from conveyor.report.timeline import busy, devices, step_idle
from tests.report.steps import STAGE_BY_STAGE, STREAMED, A, any_events, event


def causes(events, window):
    found = idle_by_cause(idle_spells(events, window), window, devices(events))
    return {group: {cause: seconds for cause, seconds in of.items() if seconds} for group, of in found.items()}


def test_a_step_by_hand():
    found = causes(STREAMED, (0, 12))
    # Engines, a mean of two. Both 6 … 11: B handed over 0.5, scored 1, trained and updated 2.5, published 1.
    # Engine 1 also 3 … 6: while B is sampled on the other.
    assert found["rollout"] == pytest.approx(
        {"longest samples": 1.5, "waiting for score": 1, "waiting for train": 2.5, "waiting for sync": 1, "other": 0.5}
    )
    # 0 … 4 until A and C are there; 5 … 6 for B, the last one; 7.5 … 12 to the end of the step.
    assert found["score"] == pytest.approx(
        {"waiting for rollout": 4, "longest samples": 1, "waiting for train": 2.5, "waiting for sync": 2, "other": 0.5}
    )
    assert found["train"] == pytest.approx({"waiting for rollout": 4, "waiting for score": 1.5, "waiting for sync": 1})


def test_logs_that_do_not_name_samples_say_nearly_the_same():
    assert causes([replace(one, samples=()) for one in STREAMED], (0, 12)) == causes(STREAMED, (0, 12))


def test_stages_that_take_turns():
    found = causes(STAGE_BY_STAGE, (0, 11))
    assert found["score"]["waiting for rollout"] == pytest.approx(2)  # until A is there
    assert found["score"]["turns"] == pytest.approx(3)  # A is, B is being sampled
    assert found["train"] == pytest.approx({"waiting for rollout": 2, "waiting for score": 1, "turns": 4, "waiting for sync": 1})
    assert found["rollout"] == pytest.approx({"waiting for score": 1, "waiting for train": 2.5, "waiting for sync": 0.5, "turns": 1})


def test_roles_that_share_a_group_take_turns():
    events = [
        event("rollout 0", "rollout", 0, 4, group="all", device="all 0"),
        event("rollout 1", "rollout", 0, 2, group="all", device="all 1", samples=(A,)),
        event("score 1", "score", 4, 5, micro_batch=0, group="all", device="all 1", samples=(A,)),
        event("train 0", "train", 1, 3, step=0, micro_batch=0),  # another group works at the same time as both
        event("train 0", "train", 4, 5, step=0, micro_batch=0),
    ]
    assert idle_by_cause(idle_spells(events, (0, 4)), (0, 4), {"all": 2, "train": 1})["all"]["turns"] == 1  # 2 … 4 on one of two devices
    alone = [one for one in events if one.worker != "rollout 0"]
    assert causes(alone, (0, 4))["all"] == {"other": 2}


def test_the_tail_begins_when_a_tenth_of_the_step_is_left():
    ends = [*range(1, 19), 30, 40]  # 20 samples: when 18 have ended, 2 are left
    events = [event("rollout 0", "rollout", 0, end, samples=((n, 0),)) for n, end in enumerate(ends)]
    events.append(event("score 0", "score", 40, 41, micro_batch=0, samples=tuple((n, 0) for n in range(20))))
    assert causes(events, (0, 41))["score"] == {"waiting for rollout": 18, "longest samples": 22}


def test_nothing_came_before():
    assert causes([event("train 0", "train", 5, 6)], (0, 6)) == {"train": {"start-up": 5}}


def test_a_slow_trainer_is_the_cause_whatever_the_engines_did_meanwhile():
    """Micro-batch 1 has long been sampled and scored when 0 is trained: the engine waits for training alone."""
    events = [
        event("rollout 0", "rollout", 0, 1, samples=(A,)),
        event("score 0", "score", 1, 2, micro_batch=0, samples=(A,)),
        event("score 0", "score", 2, 3, micro_batch=1),
        event("train 0", "train", 2, 8, micro_batch=0),
        event("train 0", "train", 8, 9, micro_batch=1),
        event("train 0", "update", 9, 10),
        event("train 0", "publish", 10, 11),
        event("rollout 0", "install", 11, 12),
    ]
    assert causes(events, (0, 12))["rollout"] == {"waiting for score": 1, "waiting for train": 8, "waiting for sync": 1}


@settings(deadline=None)
@given(any_events(), st.integers(0, 20), st.integers(1, 10))
def test_the_causes_of_a_group_add_up_to_its_idle_time(events, start, length):
    window = (start, start + length)
    spells = idle_spells(events, window)
    found = idle_by_cause(spells, window, devices(events))
    work, share = busy(events, window), step_idle(events, window)
    for group, of in found.items():
        assert set(of) == set(CAUSES)
        assert sum(of.values()) == pytest.approx(length - work[group], abs=1e-9) == pytest.approx(share[group] * length, abs=1e-9)
    assert set(found) == set(share)


@settings(deadline=None)
@given(any_events(), st.integers(1, 9))
def test_the_causes_of_two_windows_are_those_of_both_together(events, middle):
    spells, many = idle_spells(events, (0, 10)), devices(events)
    parts = [idle_by_cause(spells, window, many) for window in ((0, middle), (middle, 10))]
    for group, whole in idle_by_cause(spells, (0, 10), many).items():
        assert whole == pytest.approx({cause: parts[0][group][cause] + parts[1][group][cause] for cause in CAUSES})


def test_evaluation_that_comes_first_is_a_cause():
    events = [
        event("rollout 0", "evaluate", 0, 3),
        event("rollout 0", "rollout", 3, 5, samples=(A,)),
        event("rollout 0", "rollout", 3, 5, samples=((7, 0),)),
        event("score 0", "score", 5, 6, micro_batch=0, samples=(A,)),
    ]
    assert causes(events, (0, 6))["score"] == {"evaluation": 3, "waiting for rollout": 2}
