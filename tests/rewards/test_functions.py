"""Reward functions: found or refused in one line, called with TRL's signature, ended when they hang (cases 18, 25)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conveyor.config import RunError, UserError, parse_recipe
from conveyor.config.sections import Reward
from conveyor.models.batch import score_of
from conveyor.rewards import FunctionReward, RewardError, check_columns, load_function, process
from conveyor.rewards.functions import GIVEN, checked_scores
from conveyor.rewards.process import CallClosed
from conveyor.rewards.scorer import call_arguments
from conveyor.types import Scored
from conveyor.workers.reports import StepSettings
from tests.rewards.rollouts import rollout

pytestmark = pytest.mark.slow  # each function has a process of its own

SAMPLES = Path(__file__).with_name("samples.py")


@pytest.fixture
def reward():
    """Makes FunctionRewards of samples.py and ends their processes."""
    made = []

    def make(name: str, **settings) -> FunctionReward:
        made.append(FunctionReward(Reward(name="r", function=f"{SAMPLES}:{name}", **settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("rewards.py", "is not path.py:function"),
        ("nowhere.py:score", "no such file nowhere.py"),
        (f"{SAMPLES}:missing", "has no missing"),
        (f"{SAMPLES}:NUMBER", "is a int, not a function"),
        (f"{SAMPLES}:no_completions", "takes no argument completions"),
        (f"{SAMPLES}:swallowed", "takes no argument completions"),
        (f"{SAMPLES}:by_place", r"takes prompts and completions by position only \(before the /\); it is called with keywords"),
        ("no.such.module:score", "importing no.such.module: ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_line(named, message):
    with pytest.raises(UserError, match=message) as caught:
        load_function(named, "rewards.r.function")
    assert str(caught.value).startswith("rewards.r.function: ") and "\n" not in str(caught.value)


def test_a_file_that_fails_to_import_names_the_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(UserError, match=r"ZeroDivisionError: division by zero \(broken.py:2\)"):
        load_function(f"{path}:score", "r")


def test_a_file_that_ends_the_process_at_import_is_one_line(tmp_path):
    path = tmp_path / "leaving.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=r"r: importing .*leaving.py: SystemExit: 3 \(leaving.py:2\)"):
        load_function(f"{path}:score", "r")


def test_modules_files_and_callable_objects_load():
    assert load_function("tests.rewards.samples:length", "r")(prompts=["p"], completions=["abc"]) == [3.0]
    assert load_function(f"{SAMPLES}:judge", "r")(prompts=["p"], completions=["abc"]) == [2.0]


def test_a_missing_column_is_named():
    exact = load_function(f"{SAMPLES}:exact", "r")
    check_columns(exact, "r", ["answer", "source"])
    with pytest.raises(UserError, match="asks for the column answer; the data has source"):
        check_columns(exact, "r", ["source"])


def test_arguments_are_checked_against_the_signature():
    scaled = load_function(f"{SAMPLES}:scaled", "rewards.r.function", {"factor": 2})
    with pytest.raises(UserError, match="asks for the column factor; the data has answer"):
        check_columns(scaled, "r", ["answer"])
    check_columns(scaled, "r", ["answer"], (*GIVEN, "factor"))
    with pytest.raises(UserError, match=r"rewards.r.function: .*:scaled takes no argument factr; it takes factor") as caught:
        load_function(f"{SAMPLES}:scaled", "rewards.r.function", {"factr": 2})
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="completions comes from the samples"):
        load_function(f"{SAMPLES}:length", "r", {"completions": []})
    load_function(f"{SAMPLES}:length", "r", {"anything": 1})  # it takes **columns


def test_arguments_reach_every_call_before_a_column_of_their_name(reward):
    assert reward("scaled", arguments={"factor": 3.0}).score([rollout("ab", factor=9), rollout("c", factor=9)]).scores == (6.0, 3.0)


def test_what_the_turns_tell_comes_before_the_data():
    seen = call_arguments([rollout("a", told={"calls": 2}, calls=0, answer="4"), rollout("b", calls=1)])
    assert seen["calls"] == [2, 1] and seen["answer"] == ["4", None]


def test_ended_during_a_call(reward):
    endless, failures = reward("hangs", timeout=60), []

    def call() -> None:
        try:
            endless.score([rollout("hang")])
        except CallClosed as error:
            failures.append(error)

    endless.start()
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    endless.close()
    thread.join(5)
    assert len(failures) == 1
    with pytest.raises(CallClosed):
        endless.score([rollout("a")])


def test_the_child_process_does_not_load_torch():
    code = "import sys, conveyor.rewards.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arguments_as_text_and_as_messages():
    messages = ({"role": "user", "content": "2+2="},)
    text, chat = rollout("4", answer="4"), rollout("5", messages=messages, level=2)
    assert call_arguments([text, chat]) == {
        "prompts": ["2+2=", [{"role": "user", "content": "2+2="}]],
        "completions": ["4", [{"role": "assistant", "content": "5"}]],
        "completion_ids": [[ord("4")], [ord("5")]],
        "answer": ["4", None],
        "level": [None, 2],
    }


def test_scores_of_plain_async_and_none(reward):
    rollouts = [rollout("4", 0, answer="4"), rollout("55", 1, answer="4"), rollout("6", 2)]
    assert reward("length").score(rollouts).scores == (1.0, 2.0, 1.0)
    assert reward("slow_length").score(rollouts).scores == (1.0, 2.0, 1.0)
    assert reward("exact").score(rollouts).scores == (1.0, 0.0, None)


def test_a_column_no_row_of_the_call_has_is_none_or_left_out(reward):
    """What the dataset has is checked before the run; the micro-batch does not decide."""
    assert reward("exact").score([rollout("4", 0, answer=None), rollout("6", 1, answer=None)]).scores == (None, None)
    assert reward("exact").score([rollout("4")]).scores == (None,)
    assert reward("starred").score([rollout("4", 0, answer="4")]).scores == (0.0,)


@pytest.mark.parametrize("result", [np.array([1, 0.5]), torch.tensor([1, 0.5]), (np.float32(1), 0.5), [True, 0.5]])
def test_number_likes_become_floats(result):
    assert checked_scores(result, 2) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned the score nan, not a finite float32"),
        (1e39, r"returned the score 1e\+39, not a finite float32"),
        (-1e300, r"returned the score -1e\+300, not a finite float32"),
        pytest.param(10**400, "returned the score inf, not a finite float32", id="10**400"),
        pytest.param(-(10**5000), "returned the score -inf, not a finite float32", id="-10**5000"),
        (torch.ones(2), "returned a Tensor as a score"),
    ],
)
def test_a_score_is_a_finite_float32(value, message):
    largest = float(np.finfo(np.float32).max)
    assert checked_scores([largest, -largest], 2) == [largest, -largest]
    with pytest.raises(ValueError, match=message):
        checked_scores([1.0, value], 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(samples.py:\d+\)"),
        ("nan", "returned the score nan"),
        ("huge", r"returned the score 1e\+300"),
        ("leaves", r"raised SystemExit: 3 \(samples.py:\d+\)"),
        ("leaves_async", r"raised SystemExit: 3 \(samples.py:\d+\)"),
        ("texts", "returned the text 'good' as a score"),
        ("no_list", "returned a dict, not a list of numbers"),
        ("dies", "its process ended with status 7"),
        ("returns_code", r"returned scores that raise SystemExit: 3 \(samples.py:\d+\)"),
        ("raises_wordless", r"raised _Wordless: \(its text raises ValueError\) \(samples.py:\d+\)"),
        ("raises_half_a_pair", r"raised ValueError: half \\ud800 \(samples.py:\d+\)"),
    ],
)
def test_a_failing_function_names_the_row(reward, name, message):
    """Case 18: raises → the run says which row."""
    row = 9 if name in ("raises", "nan", "huge", "leaves", "leaves_async") else 8  # counted from 1, as lines are
    with pytest.raises(RewardError, match=f"reward r: row {row} of the data: {message}") as caught:
        reward(name).score([rollout("fine", 7), rollout("bad", 8)])
    assert "\n" not in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UserError)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(("name", "returned"), [("too_few", 1), ("always_one", 1), ("one_more", 3)])
def test_a_wrong_number_of_scores_is_not_hidden_by_calling_samples_alone(reward, name, returned, on_error):
    with pytest.raises(RewardError, match=f"reward r: returned {returned} scores for 2 samples"):
        reward(name, on_error=on_error).score([rollout("a", 1), rollout("b", 2)])


def test_skip_loses_only_the_samples_that_fail(reward):
    """Case 18, `on_error: skip`."""
    result = reward("raises", on_error="skip").score([rollout("a", 1), rollout("bad", 2), rollout("c", 3)])
    assert (result.scores, result.errors, result.timeouts) == ((1.0, None, 1.0), 1, 0)


@pytest.mark.slow
def test_an_endless_function_is_ended_and_counted(reward):
    """Case 18: `while True` → its sample is None, its neighbours are scored, the next call works."""
    endless = reward("hangs", timeout=0.5)
    endless.start()
    start = time.monotonic()
    result = endless.score([rollout("a", 1), rollout("hang", 2), rollout("c", 3)])
    assert (result.scores, result.timeouts, result.errors) == ((1.0, None, 1.0), 1, 0)
    assert endless.score([rollout("a")]).scores == (1.0,)
    assert time.monotonic() - start < 15


@pytest.mark.slow
def test_however_many_time_out_the_others_keep_their_score(reward):
    texts = ["sleep", "sleep", "sleep", "fine", "sleep"]
    result = reward("sleeps", timeout=0.2).score([rollout(text, row) for row, text in enumerate(texts)])
    assert (result.scores, result.timeouts) == ((None, None, None, 1.0, None), 4)


def test_time_outs_work_off_the_main_thread(reward):
    endless, results = reward("hangs", timeout=0.3), []
    thread = threading.Thread(target=lambda: results.append(endless.score([rollout("hang")])))
    thread.start()
    thread.join(30)
    assert results[0].scores == (None,) and results[0].timeouts == 1


def test_close_ends_the_process(reward):
    length = reward("length")
    length.start()
    pid = length._process._process.pid
    os.kill(pid, 0)
    length.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_with_its_caller():
    """Even in an endless loop, even when the caller is killed."""
    code = f"""
import threading, time
from conveyor.rewards.process import FunctionProcess
one = FunctionProcess({str(SAMPLES)!r} + ":hangs", "r")
one.start()
threading.Thread(target=lambda: one.call(dict(prompts=[""], completions=["hang"]), 600), daemon=True).start()
print(one._process.pid, flush=True)
time.sleep(600)
"""
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # An orphan's parent is init, which may be slow to reap it: a zombie has ended as well.
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the function's process outlived its caller")


def test_a_function_may_change_its_lists_but_not_the_count(reward):
    assert reward("empties").score([rollout("a"), rollout("b", 1)]).scores == (1.0, 1.0)
    with pytest.raises(RewardError, match="reward r: returned 0 scores for 2 samples"):
        reward("empties_and_returns_none").score([rollout("a"), rollout("b", 1)])


def test_a_function_that_forks_answers_once(reward):
    forks = reward("forks")
    for length in (1, 2, 3):
        assert forks.score([rollout("x" * length)]).scores == (float(length),)
        time.sleep(0.1)  # a second answer would come


def test_standard_input_is_empty(reward):
    assert reward("reads_input", timeout=5).score([rollout("a")]).scores == (0.0,)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("framed(b'junk')", r"its answer cannot be read \(UnpicklingError\): something else was written to its pipe"),
        ("framed(b'x' * 9)[:9]", None),
        ("b'\\0\\1\\0\\0unfinished'", "its process ended with status -9"),
    ],
)
def test_what_else_is_written_to_the_pipe_is_a_failure(reward, monkeypatch, written, message):
    monkeypatch.setattr(process, "END_TIMEOUT", 0.2)
    scribbles = reward("scribbles", timeout=1.0)
    with pytest.raises(RewardError, match=f"reward r: row 3 of the data: {message or ''}"):
        scribbles.score([rollout(written, 2)])
    assert scribbles.score([rollout("b''")]).scores == (1.0,), "another process"


@pytest.mark.parametrize("answer", [(0, "scores", [9.0]), (1, "scores", 9.0), (1, "well"), "ready", None])
def test_what_answers_no_call_is_dropped(reward, answer):
    assert reward("scribbles").score([rollout(f"framed(pickle.dumps({answer!r}))")]).scores == (1.0,)


def test_a_time_limit_may_be_months(reward):
    assert reward("length", timeout=1e7).score([rollout("a")]).scores == (1.0,)


def test_a_function_refused_in_its_process_is_a_user_error(reward):
    with pytest.raises(UserError, match="has no missing"):
        reward("missing").start()


def test_what_a_function_prints_is_in_the_log(tmp_path):
    log = tmp_path / "run" / "rewards.log"
    judge = FunctionReward(Reward(name="r", function=f"{SAMPLES}:talks"), log)
    try:
        assert judge.score([rollout("aye"), rollout("bee")]).scores == (1.0, 1.0)
        assert log.read_text() == "judging aye bee\n"
    finally:
        judge.close()


def test_the_log_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MOST_LOG", 40)
    log = tmp_path / "rewards.log"
    for _ in range(2):  # the second one finds it full
        judge = FunctionReward(Reward(name="r", function=f"{SAMPLES}:talks"), log)
        try:
            for _ in range(3):
                assert judge.score([rollout("x" * 30)]).scores == (1.0,)
        finally:
            judge.close()
    assert log.read_text() == f"judging {'x' * 30}\n" * 2 + "\nMore than 40 bytes: no more is written here.\n"


def test_a_weighted_sum_beyond_float32_names_the_row():
    sample, settings = Scored(rollout("a", row=4), {"r": 3e38}), StepSettings(kl_coef=0.0)

    def recipe(weight: float):
        reward = {"name": "r", "function": f"{SAMPLES}:length", "weight": weight}
        return parse_recipe(
            {"method": "ppo", "output_dir": "unused", "model": {"path": "unused"}, "data": {"path": "unused"}, "rewards": [reward]}
        )

    assert score_of(sample, recipe(1.0), settings) == 3e38
    with pytest.raises(RunError, match="row 5 of the data: the weighted sum of its rewards, 3e"):
        score_of(sample, recipe(10.0), settings)
