"""Functions in their process: what they are given, how they end, and what a function that hangs or dies does to the others."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conveyor.config import UserError
from conveyor.config.sections import MultiTurn
from conveyor.episodes import Turn, process
from conveyor.episodes.process import EpisodeProcess

pytestmark = pytest.mark.slow

PLAYS = Path(__file__).with_name("plays.py")


@dataclass
class Caller:
    """Answers every `generate` with a turn that counts on: 0, 1, 2, …"""

    settings: MultiTurn
    heard: queue.SimpleQueue[tuple[Any, ...]] = field(default_factory=queue.SimpleQueue)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    turns: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = EpisodeProcess(self.settings, self.heard.put)
        self.process.begin()

    def start(self, number: int, do: str, prompt: Any = "p", **columns: Any) -> None:
        self.turns[number] = 0
        self.process.send("start", number, {"prompt": prompt, "do": do, **columns}, self.settings.timeout)

    def next(self, *, answer: bool = True) -> tuple[Any, ...]:
        """The next message but those of `generate`, which are answered."""
        while (message := self.heard.get(timeout=20))[0] == "generate":
            self.asked.append(message)
            number = message[1]
            if answer:
                self.process.send("turn", number, Turn(str(self.turns[number]), [5], "stop"))
            self.turns[number] += 1
        return message

    def play(self, do: str, number: int = 1, **columns: Any) -> tuple[Any, ...]:
        self.start(number, do, **columns)
        kind, which, *how = self.next()
        assert (kind, which) == ("ended", number)
        return tuple(how)


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    one = Caller(MultiTurn(function=f"{PLAYS}:play"))
    yield one
    one.process.end()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """Samples have a third of a second."""
    monkeypatch.setattr(process, "GRACE", 0.2)
    one = Caller(MultiTurn(function=f"{PLAYS}:play", timeout=0.3))
    yield one
    one.process.end()


def test_turns_observations_and_columns(caller: Caller) -> None:
    caller.asked.clear()
    how = caller.play("three", 11, prompt=[{"role": "user", "content": "hi"}], answer="4")
    given = [[{"role": "user", "content": "hi"}], ["answer"]]
    assert how == ("returned", {"texts": ["0", "1", "2"], "given": given, "pair": [1, 2]})
    assert caller.asked == [
        ("generate", 11, None, None, []), ("generate", 11, "ab", None, []), ("generate", 11, "cd", 2, ["x"]),
    ]  # fmt: skip


def test_samples_are_played_at_the_same_time(caller: Caller) -> None:
    for number in range(20, 60):
        caller.start(number, "three")
    ends = [caller.next() for _ in range(40)]
    assert {number for _, number, *_ in ends} == set(range(20, 60))
    assert all(how == "returned" and value["texts"] == ["0", "1", "2"] for _, _, how, value in ends)


def test_what_is_raised_is_one_line_with_its_place(caller: Caller) -> None:
    how, text = caller.play("raises")
    line = next(i for i, line in enumerate(PLAYS.read_text().splitlines(), 1) if "such tool" in line)
    assert (how, text) == ("failed", f"raised ValueError: no such tool (plays.py:{line})")
    assert caller.play("leaves")[1].startswith("raised SystemExit: 3 (plays.py:")
    assert caller.play("raises_wordless")[1].startswith("raised _Wordless: (its text raises ValueError) (plays.py:")
    assert caller.play("returns_code")[1].startswith("returned columns that raise RuntimeError: no names (plays.py:")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("generate(3)", "raised TypeError: generate takes a text or chat messages, each with role and content, not a int (plays.py:"),
        ("generate([{'role': 'tool'}])", "raised TypeError: generate takes a text or chat messages"),
        ("generate([{'role': 'tool', 'content': 1j}])", "raised ValueError: messages that JSON cannot hold"),
        ("generate([{'role': 'tool', 'content': '\\ud800'}])", "raised ValueError: messages that JSON cannot hold: 'utf-8' codec"),
        ("generate('\\ud800')", "raised ValueError: an observation that is no text: 'utf-8' codec"),
        ("generate('x' * 2**21)", "raised ValueError: an observation of 2097152 characters; at most 1048576"),
        ("generate([{'role': 'tool', 'content': 'x' * 2**21}])", "raised ValueError: an observation of 20971"),
        ("generate(max_tokens=0)", "raised ValueError: max_tokens is 0, not a whole number from 1"),
        ("generate(stop=[''])", "raised TypeError: stop is a text or a list of texts, none of them empty"),
        ("generate(stop='\\ud800')", "raised UnicodeEncodeError: 'utf-8' codec can't encode character"),
        ("generate(colour=1)", "raised TypeError: Player._generate() got an unexpected keyword argument 'colour'"),
    ],
)
def test_wrong_calls_are_told_to_the_function(caller: Caller, call: str, text: str) -> None:
    assert caller.play("misuses", call=call)[1].startswith(text)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("3", "returned a int, not a dict of columns or None"),
        ("{'x': object()}", "returned columns that JSON cannot hold: Object of type object is not JSON serializable"),
        (
            "{'x': '\\ud800'}",
            "returned columns that JSON cannot hold: 'utf-8' codec can't encode character '\\ud800' in position 7: surrogates not allowed",
        ),
        ("{'x': nested(100)}", "returned columns that are nested more than 64 deep"),
        ("{'x': nested(900)}", "returned columns that are nested more than 64 deep"),
        ("{'completions': 1}", "returned a column completions, which reward functions have already"),
    ],
)
def test_wrong_columns(caller: Caller, what: str, text: str) -> None:
    assert caller.play("returns", what=what) == ("failed", text)


def test_turns_come_one_after_the_other(caller: Caller) -> None:
    assert "come one after the other" in caller.play("two_at_once")[1]


def test_a_refused_observation_is_the_functions_to_catch(caller: Caller) -> None:
    caller.start(5, "retries")
    assert caller.heard.get(timeout=20) == ("generate", 5, [{"role": "tool", "content": "x"}], None, [])
    caller.process.send("refuse", 5, "no template")
    assert caller.next() == ("ended", 5, "returned", {"refused": "no template"})


def test_a_dropped_sample_says_no_more(caller: Caller) -> None:
    caller.start(6, "forever")
    assert caller.heard.get(timeout=20)[:2] == ("generate", 6)
    caller.process.send("drop", 6)
    caller.process.send("turn", 6, Turn("", [5], "stop"))  # too late
    assert caller.next() == ("ended", 6, "dropped")
    assert caller.play("never", 7) == ("returned", {"calls": 0})


def test_a_waiting_function_ends_in_time_beside_the_others(hasty: Caller) -> None:
    begin = time.monotonic()
    assert hasty.play("sleep") == ("time",)
    assert 0.2 < time.monotonic() - begin < 5
    assert hasty.play("three")[0] == "returned", "the same process"


@pytest.mark.parametrize(
    "do", ["pass", pytest.param("backtrack", marks=pytest.mark.slow), pytest.param("pass_in_a_task", marks=pytest.mark.slow)]
)
def test_a_function_that_hangs_is_ended_and_named(hasty: Caller, do: str) -> None:
    """Case 18. Its neighbour waits for a turn: it is not to blame, though it began first."""
    hasty.settings = hasty.settings.model_copy(update={"timeout": 30.0})
    hasty.start(1, "forever")
    assert hasty.heard.get(timeout=20)[:2] == ("generate", 1)
    hasty.settings = hasty.settings.model_copy(update={"timeout": 0.3})
    hasty.start(2, do)
    assert hasty.next() == ("restarted", 2, None)
    assert hasty.play("three", 3)[0] == "returned", "another process goes on"


@pytest.mark.slow
def test_a_function_that_goes_on_after_its_end_is_ended_too(hasty: Caller) -> None:
    hasty.start(1, "stubborn")
    assert hasty.next() == ("ended", 1, "time")
    assert hasty.next() == ("restarted", 0, None)


def test_a_function_that_takes_its_process_down_is_named(hasty: Caller) -> None:
    hasty.start(1, "dies")
    assert hasty.next() == ("restarted", 1, "took its process down (status 7)")
    assert hasty.play("once", 2) == ("returned", {})


def test_a_function_that_forks_ends_once(caller: Caller) -> None:
    ends = [caller.play("forks", number) for number in (70, 71, 72)]
    assert ends == [("returned", {"process": caller.process._process.pid})] * 3  # type: ignore[union-attr]


def test_a_function_that_cannot_be_loaded_is_one_line() -> None:
    child = EpisodeProcess(MultiTurn(function=f"{PLAYS}:plain"), lambda message: None)
    with pytest.raises(UserError, match=r"^rollout.multi_turn.function: .*plays.py:plain is not an async function; write it as"):
        child.begin()
    child.end()
