"""Rewards that are functions or urls in a report: they are shown, make no device busy or idle, and are a cause of their own."""

import json

import pytest

from conveyor.report.causes import idle_by_cause, idle_spells
from conveyor.report.events import Event
from conveyor.report.gantt import draw_timeline
from conveyor.report.summary import Run, causes_sheets, groups_sheet, tasks_sheet
from conveyor.report.timeline import busy_bound, devices, step_idle, step_windows, workers
from conveyor.report.trace import write_trace
from tests.report.steps import A, B, event


def judge(start, end, sample, step=1):
    return Event("rewards", "rewards 0", "verifier", "judge", step, None, 0, start, end, "rewards 0", (sample,))


# 0 … 14 s. Micro-batch 0 is A, micro-batch 1 is B.
#   rollout 0  A·A·AB·B·········i     A 0–4, B 0–6, install 13–14
#   rewards    ····AAAAA·B······      A 4–9, B 6–6.5, at the same time
#   train 0    ·········01·u·p··      prepare at 6.5 (B) and 9 (A), train 9–10, 10–11, update 11–12, publish 12–13
JUDGED = [
    event("rollout 0", "rollout", 0, 4, samples=(A,)),
    event("rollout 0", "rollout", 0, 6, samples=(B,)),
    judge(4, 9, A),
    judge(6, 6.5, B),
    event("train 0", "prepare", 6.5, 6.5, micro_batch=1, samples=(B,)),
    event("train 0", "prepare", 9, 9, micro_batch=0, samples=(A,)),
    event("train 0", "train", 9, 10, micro_batch=0),
    event("train 0", "train", 10, 11, micro_batch=1),
    event("train 0", "update", 11, 12),
    event("train 0", "publish", 12, 13),
    event("rollout 0", "install", 13, 14),
]


def causes(events, window):
    found = idle_by_cause(idle_spells(events, window), window, devices(events))
    return {group: {cause: seconds for cause, seconds in of.items() if seconds} for group, of in found.items()}


def test_judging_makes_no_device_busy_or_idle():
    without = [one for one in JUDGED if one.task != "judge"]
    assert devices(JUDGED) == {"rollout": 1, "train": 1}
    assert step_idle(JUDGED, (0, 14)) == step_idle(without, (0, 14))
    assert busy_bound(JUDGED, (0, 14)) == busy_bound(without, (0, 14))
    assert step_windows(JUDGED) == {1: (0, 14)}
    assert workers(JUDGED) == [("rollout", "rollout 0"), ("rewards", "rewards 0"), ("train", "train 0")]


def test_who_waits_for_it_has_a_cause():
    # The trainer waits for B, the last to be sampled, until it is judged and prepared at 6.5, and then for A, which is judged until 9.
    # The engine has nothing to do from 6 on.
    found = causes(JUDGED, (0, 14))
    assert found["train"] == pytest.approx({"waiting for rollout": 4, "longest samples": 2, "waiting for reward": 3, "waiting for sync": 1})
    assert found["rollout"] == pytest.approx({"waiting for reward": 3, "waiting for train": 3, "waiting for sync": 1})


def test_a_score_task_that_came_before_did_not_wait_for_it():
    scored = [*JUDGED, event("score 0", "score", 4, 5, micro_batch=0, samples=(A,))]
    assert causes(scored, (0, 4))["score"] == {"waiting for rollout": 4}


def test_held_out_samples_that_are_judged_are_evaluation():
    events = [event("rollout 0", "rollout", 0, 1, samples=(A,)), judge(1, 3, (-1, 0))]
    assert causes(events, (0, 3)) == {"rollout": {"evaluation": 2}}


def test_a_group_that_is_dropped_is_replaced_once_it_is_judged():
    """A is dropped at 6, so B is sampled, which is trained."""
    events = [
        event("rollout 0", "rollout", 0, 2, samples=(A,)),
        judge(2, 6, A),
        event("rollout 0", "rollout", 6, 7, samples=(B,)),
        judge(7, 8, B),
        event("score 0", "score", 8, 9, micro_batch=0),
        event("train 0", "prepare", 9, 9, micro_batch=0, samples=(B,)),
        event("train 0", "train", 9, 10, micro_batch=0),
    ]
    found = causes(events, (0, 10))
    assert found["rollout"] == pytest.approx({"waiting for reward": 5, "waiting for score": 1, "waiting for train": 1})
    assert found["score"] == pytest.approx(
        {"waiting for rollout": 2, "waiting for reward": 5, "longest samples": 1, "waiting for train": 1}
    )


def test_stages_that_take_turns_judge_in_turn():
    """Without overlap: both are sampled, then both judged, then both trained."""
    events = [
        event("rollout 0", "rollout", 0, 2, samples=(A,)),
        event("rollout 0", "rollout", 0, 5, samples=(B,)),
        judge(5, 6, A),
        judge(5, 8, B),
        event("train 0", "prepare", 6, 6, micro_batch=0, samples=(A,)),
        event("train 0", "prepare", 8, 8, micro_batch=1, samples=(B,)),
        event("train 0", "train", 8, 9, micro_batch=0),
        event("train 0", "train", 9, 10, micro_batch=1),
    ]
    assert causes(events, (0, 10))["train"] == pytest.approx({"waiting for rollout": 2, "turns": 3, "waiting for reward": 3})


def test_tables_show_the_cause_and_the_tasks_but_no_such_group(tmp_path):
    run = Run(tmp_path, [{"step": 1, "tokens": 10}], JUDGED, "")
    sheet = groups_sheet(run, run.whole, "all steps")
    assert sheet.columns == ["", "rollout", "train"]
    assert ["idle: waiting for reward", "21.4%", "21.4%"] in sheet.rows
    assert [one.title for one in causes_sheets(run)] == ["Idle time of rollout by cause", "Idle time of train by cause"]
    assert ["judge (verifier)", 2, 5.5, 2.75, 5, "rewards 0, step 1"] in tasks_sheet(JUDGED, run.whole, "all steps").rows


def test_the_trace_has_a_lane_of_it(tmp_path):
    write_trace(JUDGED, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lane = next((e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name" and e["args"]["name"] == "rewards 0")
    own = [e for e in trace if (e["pid"], e["tid"]) == lane]
    assert [(e["ts"], e["dur"]) for e in own if e["ph"] == "X"] == [(4_000_000, 5_000_000)], "merged where samples overlap"
    assert sorted((e["ts"], e["args"]["sample"]) for e in own if e["ph"] == "b") == [(4_000_000, "0.0"), (6_000_000, "1.0")]
    assert [e["name"] for e in own if e["ph"] == "s"] == ["micro-batch 1.1", "micro-batch 1.0"]


def test_the_picture_has_a_row_of_it_that_is_busy_with_nothing():
    figure = draw_timeline(JUDGED, step_windows(JUDGED), idle_by_cause(idle_spells(JUDGED, (0, 14)), (0, 14), devices(JUDGED)))
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["rollout 0", "rewards 0", "train 0"]
    (right,) = above.child_axes
    assert [label.get_text() for label in right.get_yticklabels()] == ["50% busy", "", "29% busy"]
    assert "judge (up to 2 samples)" in [text.get_text() for text in above.get_legend().get_texts()]
    assert "waiting for reward" in [text.get_text() for text in below.get_legend().get_texts()]
