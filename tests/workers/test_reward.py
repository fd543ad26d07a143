"""The reward worker: every sample leaves once, when all its rewards have come."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from fastapi import FastAPI

from conveyor.config import UserError
from conveyor.config.sections import Reward
from conveyor.rewards import RewardError, client
from conveyor.workers.reports import Judged
from conveyor.workers.reward import RewardWorker
from tests.rewards.rollouts import rollout
from tests.rewards.serving import Serving

SAMPLES = Path(__file__).parents[1] / "rewards" / "samples.py"

pytestmark = pytest.mark.slow  # each function has a process of its own


@pytest.fixture
def worker(tmp_path):
    """Makes a started worker of rewards, NAME=settings; functions are those of samples.py."""
    made = []

    def make(**rewards) -> RewardWorker:
        sections = [Reward(name=name, **settings | {"function": f"{SAMPLES}:{settings['function']}"}) for name, settings in rewards.items()]
        made.append(RewardWorker(tuple(sections), tmp_path / "rewards.log"))
        made[-1].ready()
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(worker: RewardWorker, count: int) -> list[Judged]:
    judged: list[Judged] = []
    for together in worker.stream():
        judged += [one for one in together if isinstance(one, Judged)]
        if len(judged) >= count:
            break
    return judged


def test_a_sample_leaves_when_all_its_rewards_have_come(worker):
    both = worker(size={"function": "length"}, right={"function": "exact", "workers": 2, "batch_size": 1})
    assert both.ready().worker == "reward"
    both.judge([rollout("4", 0, answer="4", version=3), rollout("55", 1, answer="4", version=3)])
    both.judge([rollout("6", -1, version=2)], urgent=False)
    judged = {report.id.group: report for report in collect(both, 3)}
    assert {group: dict(report.rewards) for group, report in judged.items()} == {
        0: {"size": 1.0, "right": 1.0},
        1: {"size": 2.0, "right": 0.0},
        -1: {"size": 1.0, "right": None},
    }
    assert [list(report.rewards) for report in judged.values()] == [["size", "right"]] * 3
    assert judged[0].version == 3 and judged[-1].version == 2
    assert all(report.span.start <= report.span.end and report.timeouts == report.errors == 0 for report in judged.values())


def test_turns_that_failed_are_not_judged(worker):
    one = worker(r={"function": "raises"})
    one.judge([rollout("bad", 0, failure="ValueError"), rollout("fine", 1)])
    assert sorted((report.id.group, report.rewards["r"]) for report in collect(one, 2)) == [(0, None), (1, 1.0)]


def test_time_outs_and_errors_are_counted_and_leave_their_sample_out(worker):
    """Case 18."""
    one = worker(slow={"function": "hangs", "timeout": 0.5, "workers": 2}, weak={"function": "raises", "on_error": "skip"})
    one.judge([rollout("hang", 0), rollout("bad", 1), rollout("fine", 2)])
    seen = {report.id.group: (dict(report.rewards), report.timeouts, report.errors) for report in collect(one, 3)}
    assert seen == {
        0: ({"slow": None, "weak": 1.0}, 1, 0),
        1: ({"slow": 1.0, "weak": None}, 0, 1),
        2: ({"slow": 1.0, "weak": 1.0}, 0, 0),
    }


def test_a_failure_ends_the_stream_naming_the_row(worker):
    one = worker(r={"function": "raises", "batch_size": 1})
    one.judge([rollout("fine", 6), rollout("bad", 7)])
    seen: list[Judged] = []
    with pytest.raises(RewardError, match="reward r: row 8 of the data: raised ZeroDivisionError"):
        for together in one.stream():
            seen += together
    assert [report.id.group for report in seen] == [6]


def test_a_function_that_cannot_be_loaded_is_refused(tmp_path):
    one = RewardWorker((Reward(name="r", function=f"{SAMPLES}:missing"),), tmp_path / "log")
    with pytest.raises(UserError, match=r"rewards.r.function: .*has no missing"):
        one.ready()
    one.close()


def test_renewed_it_forgets_and_another_run_begins(worker):
    one = worker(r={"function": "slowly", "batch_size": 1})
    first: list[Judged] = []
    ended = threading.Thread(target=lambda: [first.extend(together) for together in one.stream()])
    ended.start()
    one.judge([rollout("old", row) for row in range(100)])
    time.sleep(0.1)
    one.renew()
    ended.join(5)
    assert not ended.is_alive() and len(first) < 50
    one.judge([rollout("new", 1000)])
    assert [report.id.group for report in collect(one, 1)] == [1000]


def test_closed_it_ends_its_stream_and_processes(worker):
    one = worker(r={"function": "hangs", "workers": 2, "batch_size": 1})
    pids = [judge._process._process.pid for judge in one._pools["r"]._judges]
    one.judge([rollout("hang", 0), rollout("fine", 1)])
    assert [report.id.group for report in collect(one, 1)] == [1]
    one.close()
    assert list(one.stream()) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_outage_of_a_url_loses_no_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.05)
    app = FastAPI()

    @app.post("/")
    def answer(body: dict) -> dict:
        return {"scores": [len(completion) for completion in body["completions"]]}

    with Serving(app) as serving:
        one = RewardWorker((Reward(name="r", url=serving.url, workers=3, batch_size=2),), tmp_path / "log")
        one.ready()
        one.judge([rollout("x" * i, i) for i in range(1, 11)])
        before = collect(one, 10)
    one.judge([rollout("x" * i, i) for i in range(11, 31)])
    time.sleep(0.3)
    with Serving(app, serving.port):
        after = collect(one, 20)
    one.close()
    assert sorted((report.id.group, report.rewards["r"]) for report in before + after) == [(i, float(i)) for i in range(1, 31)]


def test_as_an_actor_it_streams_references_and_ends_in_a_user_error(ray_session, tmp_path):
    import ray

    from conveyor.workers.records import RolloutRef

    section = Reward(name="r", function=f"{SAMPLES}:raises", batch_size=1)
    actor = ray.remote(RewardWorker).options(num_cpus=0, max_concurrency=RewardWorker.max_concurrency).remote((section,), tmp_path / "log")
    ray.get(actor.ready.remote(), timeout=60)
    stream = actor.stream.remote()
    bundle = ray.put((rollout("fine", 0), rollout("bad", 1)))
    ray.get(actor.judge.remote([RolloutRef(bundle, 0)]), timeout=60)
    (report,) = ray.get(next(stream), timeout=60)
    assert report.rewards == {"r": 1.0}
    ray.get(actor.judge.remote([RolloutRef(bundle, 1)]), timeout=60)
    with pytest.raises(UserError, match="row 2 of the data: raised ZeroDivisionError"):
        ray.get(next(stream), timeout=60)
    ray.kill(actor)
