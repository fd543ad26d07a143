"""Clocks of other machines: estimated when workers are ready, taken off their spans."""

import asyncio
import json
import time

import pytest

from conveyor.config.load import parse_recipe
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import run_plan
from conveyor.run_folder import RunFolder
from conveyor.types import SampleId
from conveyor.workers.clocks import Clocks, clock_offset
from conveyor.workers.reports import InstallReport, MicroBatchKey, SampleDone, ScoreReport, Span, TrainReport, WorkerInfo
from conveyor.workers.start import Workers


class Worker:
    """Ready at once; its clock is `ahead` of this process's."""

    def __init__(self, ahead=0.0):
        async def ready():
            return WorkerInfo("worker", "node", 1, "cpu 0", time.time() + ahead)

        self.ready = type("Method", (), {"remote": staticmethod(ready)})


def offset_of(trips):
    """`clock_offset` of a clock 5 s ahead. trips: (seconds to the worker, seconds back) of each ping."""
    clock, pings = [100.0], iter(trips)

    async def read():
        there, back = next(pings)
        clock[0] += there
        told = clock[0] + 5
        clock[0] += back
        return told

    return asyncio.run(clock_offset(read, now=lambda: clock[0]))


def test_the_quickest_ping_tells():
    assert offset_of([(0.3, 0.1), (0.001, 0.001), (0.2, 0.0), (0.0, 0.5), (0.1, 0.1)]) == pytest.approx(5)
    # Half the round trip is the error: all 8 ms went one way.
    assert offset_of([(0.008, 0.0)] * 5) == pytest.approx(5.004)


def test_what_is_within_the_error_is_no_offset():
    async def same():
        await asyncio.sleep(0.001)
        return time.time()

    assert asyncio.run(clock_offset(same)) == 0


def test_ready_compares_every_workers_clock():
    names = []
    workers = Workers([Worker(5), Worker()], {"score": [Worker(-3)]}, [[Worker(), Worker(0.5)]])
    clocks = workers.ready(names.append)
    assert len(names) == 5
    assert clocks.engines == (pytest.approx(5, abs=0.05), 0)
    assert clocks.scorers == {"score": (pytest.approx(-3, abs=0.05),)}
    assert clocks.trainers == ((0, pytest.approx(0.5, abs=0.05)),)


def test_spans_are_brought_to_the_drivers_clock(tmp_path):
    raw = {"method": "grpo", "output_dir": str(tmp_path), "model": {"path": "m"}, "data": {"path": "d"},
           "rewards": [{"name": "r", "model": "r"}], "rollout": {"n_samples_per_prompt": 2}, "train": {"rollout_batch_size": 2},
           "pipeline": {"micro_batch_size": 4}}  # fmt: skip
    recipe, folder = parse_recipe(raw), RunFolder(tmp_path)
    plan = run_plan(recipe, [2], {"rollout": 1, "score": 1, "train": 2})
    clocks = Clocks(engines=(5.0,), scorers={"score": (-3.0,)}, trainers=((0.0, 60.0),))
    recorder = Recorder(recipe, plan, folder, lambda row: None, clocks)
    key, zero = MicroBatchKey(0, 0, 0), time.time()

    def span(ahead):
        return Span(zero + 1 + ahead, zero + 2 + ahead)

    recorder.sample(0, 0, SampleDone(SampleId(0, 1), 3, False, 0, 0, span(5)))
    recorder.scored(plan.parts[0], 0, key, ScoreReport(span(-3)))
    recorder.trained(0, key, [TrainReport({}, span(0)), TrainReport({}, span(60))])
    recorder.installed("rollout", "rollout", 0, InstallReport(1, 8, span(5)))
    recorder.checkpointed(0, 1, span(0))  # the driver's own
    recorder.close()
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [event["task"] for event in events] == ["rollout", "score", "train", "train", "install", "checkpoint"]
    for event in events:
        assert (event["start"], event["end"]) == (pytest.approx(1, abs=0.1), pytest.approx(2, abs=0.1))
    assert events[0]["samples"] == [[0, 1]]
