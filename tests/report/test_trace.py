"""trace.json as Perfetto reads it: tracks, slices that nest nowhere, and arrows that start and end inside slices."""

import itertools
import json
from collections import defaultdict

from hypothesis import HealthCheck, given, settings

from conveyor.report.trace import write_trace
from tests.report.steps import STREAMED, A, any_events, event


def trace_of(events, folder):
    write_trace(events, folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def threads(trace):
    """(pid, tid) → name"""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}


def slices(trace):
    """Thread → [(start, end, task)] in µs, in order."""
    names, found = threads(trace), defaultdict(list)
    for e in trace:
        if e["ph"] == "X":
            found[names[e["pid"], e["tid"]]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return {name: sorted(pieces) for name, pieces in found.items()}


def arrows(trace):
    """[(name, (from thread, task), (to thread, task))], each end looked up in the slice it lies in."""
    names, pieces = threads(trace), slices(trace)
    ends = defaultdict(dict)
    for e in trace:
        if e["ph"] in "sf":
            assert e["ph"] not in ends[e["id"]], "an arrow has one start and one end"
            thread = names[e["pid"], e["tid"]]
            inside = [task for start, end, task in pieces[thread] if start <= e["ts"] < end]
            assert len(inside) == 1
            ends[e["id"]][e["ph"]] = (e["name"], e["cat"], thread, inside[0], e["ts"])
            assert e["ph"] == "s" or e["bp"] == "e"
    for both in ends.values():
        assert set(both) == {"s", "f"}
        assert both["s"][:2] == both["f"][:2] and both["s"][4] <= both["f"][4]
    return [(both["s"][0], both["s"][2:4], both["f"][2:4]) for both in ends.values()]


def test_one_track_a_worker_and_slices_that_do_not_overlap(tmp_path):
    trace = trace_of(STREAMED, tmp_path)
    assert list(threads(trace).values()) == ["rollout 0", "rollout 1", "score 0", "train 0"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == ["rollout", "score", "train"]
    found = slices(trace)
    assert found["rollout 0"] == [(0, 6_000_000, "rollout"), (11_000_000, 12_000_000, "install")]
    assert len(found["train 0"]) == 4
    for pieces in found.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))


def test_samples_that_overlap_are_asynchronous_slices(tmp_path):
    trace = trace_of(STREAMED, tmp_path)
    begins = {e["id2"]["local"]: (e["ts"], e["args"]["sample"]) for e in trace if e["ph"] == "b"}
    ends = {e["id2"]["local"]: e["ts"] for e in trace if e["ph"] == "e"}
    assert sorted((*begins[name], ends[name]) for name in begins) == [(0, "0.0", 4_000_000), (2_000_000, "1.0", 6_000_000)]


def test_different_tasks_that_overlap_get_a_second_row(tmp_path):
    trace = trace_of([event("rollout 0", "rollout", 0, 2), event("rollout 0", "install", 1, 3)], tmp_path)
    assert list(threads(trace).values()) == ["rollout 0", "rollout 0 (2)"]


def test_arrows_lead_a_micro_batch_through_the_stages_and_the_weights_back(tmp_path):
    following = event("rollout 1", "rollout", 12, 13, step=2)
    assert sorted(arrows(trace_of([*STREAMED, following], tmp_path))) == sorted(
        [
            ("micro-batch 1.0", ("rollout 0", "rollout"), ("score 0", "score")),  # A
            ("micro-batch 1.0", ("rollout 1", "rollout"), ("score 0", "score")),  # C
            ("micro-batch 1.0", ("score 0", "score"), ("train 0", "train")),
            ("micro-batch 1.0", ("train 0", "train"), ("train 0", "update")),
            ("micro-batch 1.1", ("rollout 0", "rollout"), ("score 0", "score")),  # B
            ("micro-batch 1.1", ("score 0", "score"), ("train 0", "train")),
            ("micro-batch 1.1", ("train 0", "train"), ("train 0", "update")),
            ("weights of step 1", ("train 0", "update"), ("train 0", "publish")),
            ("weights of step 1", ("train 0", "publish"), ("rollout 0", "install")),
            ("weights of step 1", ("train 0", "publish"), ("rollout 1", "install")),
            ("weights of step 1", ("rollout 1", "install"), ("rollout 1", "rollout")),
        ]
    )


def test_ranks_share_a_micro_batch_and_pass_it_on_to_themselves(tmp_path):
    """Two score parts, two ranks, two updates: each prepare has both parts, each update its own trains."""
    events = [event("score 0", "score", 0, 1, micro_batch=0), event("judge 0", "score", 0, 2, micro_batch=0)]
    for rank in ("train 0", "train 1"):
        events += [
            event(rank, "prepare", 2, 3, micro_batch=0),
            event(rank, "train", 3, 4, micro_batch=0),
            event(rank, "update", 4, 5),
            event(rank, "train", 5, 6, micro_batch=0),  # a second pass
            event(rank, "update", 6, 7),
        ]
    found = arrows(trace_of(events, tmp_path))
    for rank in ("train 0", "train 1"):
        into = [source for _, source, target in found if target[0] == rank]
        assert sorted(into) == sorted(
            [("judge 0", "score"), ("score 0", "score"), *2 * [(rank, "prepare")], *2 * [(rank, "train")]],
        )


def test_events_without_length_keep_their_arrows(tmp_path):
    events = [event("rollout 0", "rollout", 1, 1, samples=(A,)), event("score 0", "score", 1, 1, micro_batch=0, samples=(A,))]
    assert arrows(trace_of(events, tmp_path)) == [("micro-batch 1.0", ("rollout 0", "rollout"), ("score 0", "score"))]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_events())
def test_whatever_happened_the_trace_is_sound(tmp_path, events):
    trace = trace_of(events, tmp_path)
    arrows(trace)
    for pieces in slices(trace).values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))
    assert len({e["id2"]["local"] for e in trace if e["ph"] == "b"}) == sum(e["ph"] == "e" for e in trace)
