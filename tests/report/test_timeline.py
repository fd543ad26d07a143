"""Busy and idle shares, bounds and traces against numbers worked out by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.report.events import Event, EventLog, read_events
from conveyor.report.timeline import (
    busy,
    busy_bound,
    clipped,
    covered,
    devices,
    occupancy,
    running,
    step_idle,
    step_windows,
    union,
    workers,
)


def event(group, worker, task, start, end, step=0, micro_batch=None, device=None):
    return Event(group, worker, "role", task, step, micro_batch, 0, start, end, device)


# One step by hand, 0 … 10 s (| = 1 s). Two engines, one score worker, one train worker.
#   rollout-0  ■■■■■■··i·      samples 0–4, 2–6 (overlapping), install 8–9
#   rollout-1  ■■■·····i·      sample 0–3
#   score-0    ····■■··        4–5, 5–6
#   train-0    ·····■■■p       train 5–7, update 7–8, publish 8–8.5
STEP = [
    event("rollout", "rollout-0", "rollout", 0, 4),
    event("rollout", "rollout-0", "rollout", 2, 6),
    event("rollout", "rollout-1", "rollout", 0, 3),
    event("score", "score-0", "score", 4, 5, micro_batch=0),
    event("score", "score-0", "score", 5, 6, micro_batch=1),
    event("train", "train-0", "train", 5, 7, micro_batch=0),
    event("train", "train-0", "update", 7, 8),
    event("train", "train-0", "publish", 8, 8.5),
    event("rollout", "rollout-0", "install", 8.5, 9),
    event("rollout", "rollout-1", "install", 8.5, 9),
]


def test_idle_shares_by_hand():
    idle = step_idle(STEP, (0, 10))
    # rollout: (6.5 + 3.5) / 2 of 10; score 2; train 3.5
    assert idle == pytest.approx({"rollout": 0.5, "score": 0.8, "train": 0.65})


def test_events_are_cut_at_the_window():
    assert busy(STEP, (3, 5.5)) == pytest.approx({"rollout": 2.5 / 2, "score": 1.5, "train": 0.5})
    assert step_idle(STEP, (20, 21)) == {"rollout": 1, "score": 1, "train": 1}
    assert step_idle(STEP, (3, 3)) == {"rollout": 0, "score": 0, "train": 0}


def test_workers_that_take_turns_on_a_device_are_one():
    merged = [event("all", "rollout-0", "rollout", 0, 4, device="gpu-0"), event("all", "train-0", "train", 4, 8, device="gpu-0")]
    assert step_idle(merged, (0, 10)) == pytest.approx({"all": 0.2})


def test_bound_is_the_busiest_group_plus_sync():
    bound = busy_bound(STEP, (0, 10))
    # busy without syncs: rollout (6 + 3) / 2 = 4.5, score 2, train 3; sync 8 … 9, once, though two engines install
    assert (bound.group, bound.seconds, bound.efficiency) == ("rollout", pytest.approx(5.5), pytest.approx(0.55))


def test_evaluation_keeps_devices_busy_but_no_step_needs_it():
    events = [*STEP, event("score", "score-0", "evaluate", 6, 10)]
    assert step_idle(events, (0, 10))["score"] == pytest.approx(0.4)
    assert busy_bound(events, (0, 10)) == busy_bound(STEP, (0, 10))


def test_bound_never_exceeds_the_window():
    bound = busy_bound([event("train", "train-0", "train", 0, 4), event("rollout", "engine", "install", 0, 4)], (0, 4))
    assert (bound.seconds, bound.efficiency) == (4, 1)
    with pytest.raises(ValueError):
        busy_bound([], (0, 1))


def test_step_windows_lie_end_to_end_whatever_was_sampled_ahead():
    events = [
        event("rollout", "r", "rollout", 1, 4, step=0),
        event("train", "t", "update", 4, 6, step=0),
        event("rollout", "r", "rollout", 3, 7, step=1),  # sampled ahead
        event("rollout", "r", "install", 7, 8, step=0),
        event("train", "t", "update", 9, 11, step=1),
        event("rollout", "r", "rollout", 11, 12, step=2),  # has not ended
    ]
    assert step_windows(events) == {0: (1, 8), 1: (8, 11)}
    assert step_windows([]) == {}


def test_union_joins_what_touches():
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12), st.integers(0, 30), st.integers(0, 30))
def test_covered_counts_each_second_once(pieces, start, length):
    intervals = [(begin, begin + long) for begin, long in pieces]
    seconds = sum(any(a <= t < b for a, b in intervals) for t in range(start, start + length))
    assert covered(intervals, (start, start + length)) == seconds


def test_what_lies_in_a_window():
    pieces = [(0, 2), (3, 5), (6, 9)]
    assert list(clipped(pieces, (1, 7))) == [(1, 2), (3, 5), (6, 7)]
    assert list(clipped(pieces, (4, 4.5))) == [(4, 4.5)]
    assert list(clipped(pieces, (2, 3))) == list(clipped([], (0, 1))) == []


def test_samples_in_the_engines_at_a_time():
    assert running(STEP) == [(0, 2), (2, 3), (3, 2), (4, 1), (6, 0)]
    assert occupancy(STEP, (0, 10)) == pytest.approx({"rollout-0": 0.8, "rollout-1": 0.3})
    assert occupancy(STEP, (3, 5)) == pytest.approx({"rollout-0": 1.5, "rollout-1": 0})


def test_workers_stand_in_the_order_of_stages_and_numbers():
    events = [event("train", f"train {n}", "train", 0, 1) for n in (10, 2)] + [event("a", "rollout 1", "install", 0, 1)]
    events += [event("a", "rollout 1", "rollout", 1, 2), event("train", "score train 0", "score", 1, 2)]
    assert workers(events) == [("a", "rollout 1"), ("train", "score train 0"), ("train", "train 2"), ("train", "train 10")]
    assert devices(events) == {"a": 1, "train": 3}


# files -----------------------------------------------------------------------------------------------------------


def test_event_log_gives_back_what_was_written(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for one in STEP[:4]:
            log.append(one)
        log.flush()
        assert read_events(path) == STEP[:4]
        log.append(STEP[4])
    with EventLog(path) as log:  # a resumed run goes on in the same file
        log.append(STEP[5])
    assert read_events(path) == STEP[:6]


def test_samples_are_given_back_and_older_logs_have_none(tmp_path):
    path = tmp_path / "events.jsonl"
    one = Event("score", "s", "r", "score", 1, 0, 0, 0.0, 1.0, None, ((3, 0), (3, 1)))
    with EventLog(path) as log:
        log.append(one)
    assert read_events(path) == [one]
    fields = json.loads(path.read_text())
    del fields["samples"]
    path.write_text(json.dumps(fields) + "\n")
    assert read_events(path)[0].samples == ()


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append(STEP[0])
        log.append(STEP[1])
    path.write_text(path.read_text()[:-20])
    assert read_events(path) == STEP[:1]


def test_a_line_that_is_no_event_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"group": "train"}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 1"):
        read_events(path)
