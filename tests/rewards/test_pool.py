"""The pool of a reward: who is judged when, and by whom."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from conveyor.config.sections import Reward
from conveyor.rewards.pool import RewardPool
from conveyor.rewards.process import CallFailed
from conveyor.rewards.scorer import Judge, RewardError
from tests.rewards.rollouts import rollout

SAMPLES = Path(__file__).with_name("samples.py")


class Recorder(Judge):
    """Notes its calls; waits for `gate` in each."""

    def __init__(self, reward: Reward, calls: list, gate: threading.Semaphore) -> None:
        super().__init__(reward)
        self._calls, self._gate = calls, gate

    def start(self) -> None: ...

    def close(self) -> None:
        self._gate.release()

    def _call(self, rollouts):
        self._calls.append([rollout.text for rollout in rollouts])
        self._gate.acquire()
        if any(rollout.text == "bad" for rollout in rollouts):
            raise CallFailed("raised")
        return [float(len(rollout.text)) for rollout in rollouts]


@pytest.fixture
def recorded():
    """Makes a pool with recorders: (pool, calls, gate)."""
    made = []

    def make(**settings):
        pool, calls, gate = RewardPool(reward := Reward(name="r", function="unused:unused", **settings)), [], threading.Semaphore(0)
        pool._judges = [Recorder(reward, calls, gate) for _ in range(reward.workers)]
        made.append(pool)
        pool.start()
        return pool, calls, gate

    yield make
    for pool in made:
        pool.close()
        for thread in pool._threads:
            thread.join(5)
            assert not thread.is_alive()


def put(pool: RewardPool, texts: list[str], answers: dict, urgent: bool = True) -> None:
    pool.put([(rollout(text), lambda answer, text=text: answers.__setitem__(text, answer)) for text in texts], urgent)


def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_training_comes_first_then_order_of_arrival_and_those_that_wait_share_a_call(recorded):
    pool, calls, gate = recorded(batch_size=3)
    answers: dict = {}
    put(pool, ["first"], answers)
    until(lambda: calls)
    put(pool, ["e1", "e2"], answers, urgent=False)
    put(pool, ["t1", "t2"], answers)
    put(pool, ["t3", "t4"], answers)
    gate.release(9)
    until(lambda: len(answers) == 7)
    assert calls == [["first"], ["t1", "t2", "t3"], ["t4"], ["e1", "e2"]]  # held-out ones never share a call with training
    assert answers["e1"].score == 2.0


def test_free_workers_share_what_waits(recorded):
    pool, calls, gate = recorded(workers=4, batch_size=64)
    until(lambda: pool._free == 4)
    put(pool, [f"{i:02}" for i in range(10)], answers := {})
    until(lambda: len(calls) == 4)
    assert sorted(map(len, calls)) == [2, 2, 3, 3]
    gate.release(4)
    until(lambda: len(answers) == 10)


def test_what_waits_can_be_forgotten(recorded):
    pool, calls, gate = recorded(batch_size=1)
    put(pool, ["a", "b"], answers := {})
    until(lambda: calls)
    pool.forget()
    put(pool, ["c"], answers)
    gate.release(9)
    until(lambda: len(answers) == 2)
    assert calls == [["a"], ["c"]]


def test_a_failure_reaches_those_that_had_no_answer(recorded):
    pool, _, gate = recorded()
    gate.release(9)
    put(pool, ["ok", "bad", "late"], answers := {})
    until(lambda: len(answers) == 3)
    assert answers["ok"].score == 2.0
    assert isinstance(answers["bad"], RewardError) and "row 1 of the data: raised" in str(answers["bad"])


def test_skip_loses_only_the_sample_that_fails(recorded):
    pool, _, gate = recorded(on_error="skip")
    gate.release(9)
    put(pool, ["ok", "bad", "late"], answers := {})
    until(lambda: len(answers) == 3)
    assert [answers[text].score for text in ("ok", "bad", "late")] == [2.0, None, 4.0]
    assert answers["bad"].lost == "error"


@pytest.mark.slow
def test_an_endless_function_holds_up_neither_other_workers_nor_later_samples():
    """Case 18."""
    pool = RewardPool(Reward(name="r", function=f"{SAMPLES}:hangs", workers=2, batch_size=1, timeout=1.0))
    pool.start()
    try:
        put(pool, ["hang"], answers := {})
        start = time.monotonic()
        put(pool, [f"fine {i}" for i in range(5)], answers)
        until(lambda: len(answers) == 5)
        assert "hang" not in answers and time.monotonic() - start < 0.9
        until(lambda: len(answers) == 6)
        assert answers["hang"].score is None and answers["hang"].lost == "timeout"
        put(pool, ["again"], answers)
        until(lambda: "again" in answers)
    finally:
        pool.close()
