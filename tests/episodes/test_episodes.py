"""From what a function asks for to rollouts: tokens, masks, limits, failures. The engine and the function's process are played by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from conveyor.config.sections import MultiTurn
from conveyor.config.sections import Rollout as RolloutSection
from conveyor.episodes import EpisodeError
from conveyor.episodes.episode import Sampled
from conveyor.episodes.episodes import Episodes
from conveyor.types import Prompt, Rollout
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = 2
ODD = TOKENIZER.convert_tokens_to_ids("ÿ")
"""The byte 0xFF: as text it is U+FFFD, which is three other tokens."""


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@dataclass
class Engine:
    version: int = 0
    requests: dict[str, tuple[list[int], Callable[[Sampled], None], dict[str, Any]]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    so_far: Sampled | None = None
    """What a request that is aborted has sampled."""

    def add(self, token_ids: Sequence[int], done: Callable[[Sampled], None], **settings: Any) -> str:
        name = str(len(self.requests))
        self.requests[name] = (list(token_ids), done, settings)
        return name

    def abort(self, name: str) -> Sampled | None:
        self.aborted.append(name)
        return self.so_far

    def finish(self, ids: list[int], reason: str = "stop") -> None:
        """The newest request ends; log-probs are −1, −2, …"""
        logprobs, versions = -torch.arange(1.0, len(ids) + 1), torch.full((len(ids),), self.version, dtype=torch.int32)
        list(self.requests.values())[-1][1](Sampled(ids, logprobs, versions, reason))  # type: ignore[arg-type]

    @property
    def last(self) -> tuple[list[int], dict[str, Any]]:
        ids, _, settings = list(self.requests.values())[-1]
        return ids, settings


class Play:
    """One sample of the prompt 1 5 6, whose function is the test."""

    def __init__(self, limit: int = 64, prompt: Prompt | None = None, **settings: Any) -> None:
        section = RolloutSection(max_response_length=limit, multi_turn=MultiTurn(function="f.py:f", **settings))
        self.engine, self.sent, self.done = Engine(), list[tuple[Any, ...]](), list[Rollout]()
        self.episodes = Episodes(section, TOKENIZER, self.engine, lambda *place: sum(place), lambda *message: self.sent.append(message))
        self.prompt = prompt or Prompt(100, 4, (1, 5, 6), "ab", columns={"answer": 4, "prompt": "no"})
        self.drop = self.episodes.begin(self.prompt, 10, None, self.done.append)
        self.number = self.sent[0][1]

    def generate(self, said: Any = None, max_tokens: int | None = None, stop: Sequence[str] = ()) -> None:
        self.episodes.hear(("generate", self.number, said, max_tokens, list(stop)))

    def turn(self, ids: list[int], said: Any = None, reason: str = "stop") -> None:
        self.generate(said)
        self.engine.finish(ids, reason)

    def end(self, *how: Any) -> Rollout:
        self.episodes.hear(("ended", self.number, *how))
        return self.done[0]


def test_the_function_is_told_prompt_and_columns() -> None:
    assert Play().sent == [("start", 1, {"answer": 4, "prompt": "ab"}, 300.0)]
    messages = ({"role": "user", "content": "ab"},)
    assert Play(prompt=Prompt(1, 1, (1,), "<|user|>ab", messages)).sent[0][2] == {"prompt": [{"role": "user", "content": "ab"}]}


def test_ids_masks_and_versions() -> None:
    play = Play()
    play.turn([ODD, 70, EOS])
    assert play.sent[-1] == ("turn", 1, ("�" + TOKENIZER.decode([70]), [ODD, 70, EOS], "stop"))
    play.engine.version = 1
    play.generate("hi</s>")
    assert play.engine.last[0] == [1, 5, 6, ODD, 70, EOS, *ids_of("hi"), EOS], "as they were sampled, and the text alone"
    play.engine.version = 2
    play.engine.finish([80, 81])
    rollout = play.end("returned", {"calls": 1})
    assert rollout.response_ids.tolist() == [ODD, 70, EOS, *ids_of("hi"), EOS, 80, 81]
    assert rollout.sampled_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert rollout.logprobs.tolist() == [-1, -2, -3, 0, 0, 0, -1, -2]
    assert rollout.versions.tolist() == [0] * 6 + [2] * 2
    assert (rollout.finish_reason, rollout.turns, rollout.columns, rollout.failure) == ("stop", 2, {"calls": 1}, None)
    assert rollout.text == TOKENIZER.decode(rollout.response_ids, skip_special_tokens=True)
    dtypes = [rollout.response_ids.dtype, rollout.logprobs.dtype, rollout.versions.dtype, rollout.sampled_mask.dtype]
    assert dtypes == [torch.int64, torch.float32, torch.int32, torch.bool]


def test_one_turn_is_a_plain_sample() -> None:
    play = Play(limit=2)
    play.turn([70, 71], reason="length")
    rollout = play.end("returned", {})
    assert rollout.sampled is None
    assert (rollout.turns, rollout.finish_reason, rollout.columns) == (1, "length", {})


def test_a_last_turn_that_was_to_be_short_is_not_cut() -> None:
    play = Play()
    play.generate(max_tokens=2)
    play.engine.finish([70, 71], "length")
    assert play.sent[-1][2].finish_reason == "length"
    assert not play.end("returned", {}).truncated


def test_each_turn_has_a_seed_and_what_is_left() -> None:
    play = Play(limit=20)
    play.turn([70, 71, EOS])
    play.generate("abc", max_tokens=5, stop=["x"])
    settings = play.engine.last[1]
    assert settings == {"seed": 100 + 10 + 1, "temperature": None, "max_tokens": 5, "stop": ["x"]}
    play.engine.finish([70] * 5)
    play.generate("d")
    assert play.engine.last[1]["max_tokens"] == 20 - 3 - 3 - 5 - 1


@pytest.mark.parametrize(("said", "fits"), [("a" * 6, True), ("a" * 7, False)])
def test_an_observation_that_leaves_no_room_is_not_appended(said: str, fits: bool) -> None:
    play = Play(limit=10)
    play.turn([70, 71, EOS])
    play.generate(said)
    if fits:
        assert play.engine.last[1]["max_tokens"] == 1
        return
    assert play.sent[-1] == ("drop", 1)
    assert play.done[0].response_ids.tolist() == [70, 71, EOS]
    assert (play.done[0].finish_reason, play.done[0].truncated) == ("length", True)


def test_tokens_used_up() -> None:
    play = Play(limit=2)
    play.turn([70, 71], reason="length")
    play.generate()
    assert play.done[0].finish_reason == "length"


def test_one_turn_too_many() -> None:
    play = Play(max_turns=2)
    play.turn([70])
    play.turn([71], said="x")
    play.generate()
    assert (play.done[0].finish_reason, play.done[0].turns, len(play.done[0].response_ids)) == ("turns", 2, 3)
    assert play.sent[-1] == ("drop", 1)


@pytest.mark.parametrize("so_far", [[], [80, 81]])
def test_time_is_over_while_a_turn_is_sampled(so_far: list[int]) -> None:
    """What there is of the turn stays, after what was observed; nothing of either where there is nothing yet."""
    play = Play()
    play.turn([70])
    play.generate("x")
    if so_far:
        play.engine.so_far = Sampled(so_far, torch.tensor([-1.0, -2.0]), torch.tensor([1, 1], dtype=torch.int32), "length")
    rollout = play.end("time")
    assert play.engine.aborted == ["1"]
    assert rollout.response_ids.tolist() == [70, *(ids_of("x") + so_far if so_far else [])]
    assert rollout.sampled_mask.tolist() == [True, *([False, True, True] if so_far else [])]
    assert rollout.logprobs.tolist() == [-1, *([0, -1, -2] if so_far else [])]
    assert (rollout.finish_reason, rollout.failure) == ("time", None)


@pytest.mark.parametrize(("how", "finish", "why"), [(("returned", {}), "stop", "without a turn"), (("time",), "time", "within 300 s")])
def test_a_sample_without_a_turn_is_one_token_that_was_not_sampled(how: tuple[Any, ...], finish: str, why: str) -> None:
    play = Play()
    play.engine.version = 3
    rollout = play.end(*how)
    assert rollout.response_ids.tolist() == [EOS]
    assert (rollout.sampled_mask.tolist(), rollout.logprobs.tolist(), rollout.versions.tolist()) == ([False], [0.0], [3])
    assert (rollout.finish_reason, rollout.turns) == (finish, 0)
    assert rollout.failure is not None and why in rollout.failure


def test_a_function_that_raises() -> None:
    play = Play()
    play.turn([70])
    with pytest.raises(EpisodeError, match=r"^rollout.multi_turn.function: row 5 of the data: raised ValueError: x \(f.py:3\)$"):
        play.end("failed", "raised ValueError: x (f.py:3)")
    play = Play(on_error="skip")
    play.turn([70])
    rollout = play.end("failed", "raised ValueError: x (f.py:3)")
    assert rollout.failure == "row 5 of the data: raised ValueError: x (f.py:3)"
    assert rollout.response_ids.tolist() == [70]


def test_a_dropped_sample_is_never_delivered() -> None:
    play = Play()
    play.generate()
    play.drop()
    assert (play.engine.aborted, play.sent[-1]) == (["0"], ("drop", 1))
    play.episodes.hear(("ended", 1, "dropped"))
    play.generate()
    assert play.done == [] and len(play.engine.requests) == 1


@pytest.mark.parametrize("why", [None, "took its process down (status 7)"])
def test_in_a_new_process_all_but_the_blamed_begin_anew(why: str | None) -> None:
    play = Play(on_error="skip")
    other = list[Rollout]()
    play.episodes.begin(Prompt(7, 7, (1, 9), "c"), 0, 0.0, other.append)
    play.turn([70])
    play.episodes.hear(("generate", 2, None, None, []))
    first = play.engine.last
    play.episodes.hear(("restarted", 1, why))
    (blamed,) = play.done
    assert (blamed.finish_reason, blamed.failure) == (("time", None) if why is None else ("stop", f"row 5 of the data: {why}"))
    assert play.engine.aborted == ["1"] and other == []
    assert play.sent[-3:] == [("drop", 1), ("drop", 2), ("start", 3, {"prompt": "c"}, 300.0)]
    play.episodes.hear(("generate", 2, None, None, []))  # from the process that is no more
    play.episodes.hear(("generate", 3, None, None, []))
    assert len(play.engine.requests) == 3 and play.engine.last == first, "the same seed and prompt, so the same tokens"
    play.engine.finish([80, EOS])
    play.episodes.hear(("ended", 3, "returned", {}))
    assert other[0].response_ids.tolist() == [80, EOS]


TOOL = [{"role": "tool", "content": "12"}]
TOOL_IDS = [*ids_of("<|tool|>12<|assistant|>")]


@pytest.mark.parametrize(("turn", "observed"), [([70, EOS], TOOL_IDS), ([70], [EOS, *TOOL_IDS])])
def test_messages_follow_the_end_of_what_the_assistant_said(turn: list[int], observed: list[int]) -> None:
    play = Play()
    play.turn(turn)
    play.generate(TOOL)
    assert play.engine.last[0] == [1, 5, 6, *turn, *observed]
    assert TOKENIZER.convert_tokens_to_ids("<|assistant|>") == observed[-1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no tools') }}", "the chat template refuses it: no tools"),
        ("{% for message in messages %}x{% endfor %}", "the chat template leaves out what the assistant said"),
        (None, "the tokenizer has no chat template"),
    ],
)
def test_messages_that_cannot_be_rendered_are_the_functions_to_know(template: str | None, message: str, monkeypatch: Any) -> None:
    play = Play()
    play.turn([70])
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    play.generate(TOOL)
    kind, number, text = play.sent[-1]
    assert (kind, number) == ("refuse", 1) and message in text
    play.turn([71], said="12")
    assert play.end("returned", {}).turns == 2, "a refused observation is no turn"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("half \ud800", "an observation that is no text: 'utf-8' codec"),
        ([{"role": "tool", "content": "half \ud800"}], "an observation that is no text: 'utf-8' codec"),
        ("x" * (2**20 + 1), "an observation of 1048577 characters; at most 1048576"),
    ],
)
def test_what_cannot_be_tokenised_is_the_functions_to_know(said: Any, message: str) -> None:
    play = Play()
    play.turn([70])
    play.generate(said)
    kind, number, text = play.sent[-1]
    assert (kind, number) == ("refuse", 1) and text.startswith(message)
