"""A reward behind a url: what is sent, what is refused, and outages that lose nothing."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from contextlib import suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from conveyor.config import UserError
from conveyor.config.sections import Reward
from conveyor.rewards import client
from conveyor.rewards.client import UrlReward
from conveyor.rewards.process import CallClosed
from conveyor.rewards.scorer import RewardError
from tests.rewards.rollouts import rollout
from tests.rewards.serving import Serving

pytestmark = pytest.mark.slow


class Script:
    """An app that answers as told, one after the other, and then with the completions' lengths; keeps what it was asked."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []
        self.app = FastAPI()
        self.app.post("/")(self.answer)

    async def answer(self, request: Request):
        body = await request.json()
        self.asked.append((body, request.headers.get("authorization")))
        if self.answers:
            return self.answers.pop(0)
        return {"scores": [len(completion) for completion in body["completions"]]}


@pytest.fixture
def ask(monkeypatch):
    """Serves a script and makes a client of it: (script, client)."""
    monkeypatch.setattr(client, "FIRST_WAIT", 0.02)
    open_now = []

    def make(*answers, **settings):
        script = Script(*answers)
        serving = Serving(script.app).__enter__()
        reward = UrlReward(Reward(name="r", url=serving.url, **settings))
        open_now.append((serving, reward))
        reward.start()
        return script, reward

    yield make
    for serving, reward in open_now:
        reward.close()
        serving.__exit__()


def test_a_server_gets_what_a_function_gets(ask, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    script, reward = ask(token_variable="REWARD_TOKEN", arguments={"style": "strict"})
    assert reward.score([rollout("4", answer="4"), rollout("55", 1)]).scores == (1.0, 2.0)
    assert script.asked == [
        (
            {
                "prompts": ["2+2=", "2+2="], "completions": ["4", "55"], "completion_ids": [[52], [53, 53]], "answer": ["4", None],
                "truncated": [False, False], "style": "strict",
            },
            "Bearer s3cret",
        )
    ]  # fmt: skip


def test_errors_that_pass_are_waited_for_and_said_once(ask, caplog):
    script, reward = ask(PlainTextResponse("busy", 503), JSONResponse({"detail": "slow down"}, 429), PlainTextResponse("oh", 500))
    with caplog.at_level(logging.WARNING):
        assert reward.score([rollout("abc")]).scores == (3.0,)
    assert len(script.asked) == 4
    assert [record.getMessage().split(";")[0] for record in caplog.records if record.name == client.__name__] == [
        "rewards.r.url: does not answer: 503: busy",
        "rewards.r.url: answers again, after 0 s",
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (JSONResponse({"detail": "no token,\nor a wrong one"}, 401), "rewards.r.url: the server refuses: 401: no token, or a wrong one"),
        (PlainTextResponse("x" * 1000, 413), "rewards.r.url: the server refuses: 413: x{300}…"),
        (JSONResponse({"score": [1]}), "rewards.r.url: the answer is no .*scores"),
        (PlainTextResponse("hello"), "rewards.r.url: the answer is no .* but hello"),
        (Response(b"hello", media_type="text/plain; charset=hex"), "rewards.r.url: the answer is no .* but hello"),
        (Response(b"hello", headers={"content-encoding": "gzip"}), "rewards.r.url: the answer is no .* but what cannot be decompressed"),
        (PlainTextResponse("[" * 100_000), r"rewards.r.url: the answer is no .* but \[{300}…"),
        (PlainTextResponse('{"detail": "\\ud800"}', 400), r"rewards.r.url: the server refuses: 400: \?"),
        (PlainTextResponse(" " * (2**20 + 129)), "rewards.r.url: the answer is longer than 1048704 bytes"),
        (JSONResponse({"scores": [1.0]}), "reward r: returned 1 scores for 2 samples"),
        (JSONResponse({"scores": 3}), "reward r: row 1 of the data: returned a int"),
    ],
)
def test_what_would_fail_again_ends_the_run_in_one_line(ask, answer, message):
    _, reward = ask(answer, JSONResponse({"scores": 3}))
    with pytest.raises(RewardError, match=message) as caught:
        reward.score([rollout("a"), rollout("b", 1)])
    assert "\n" not in str(caught.value)


def test_a_score_that_is_no_number_names_its_row(ask):
    nan = PlainTextResponse('{"scores": [NaN, 1]}')
    _, reward = ask(nan, PlainTextResponse('{"scores": [1]}'), PlainTextResponse('{"scores": [NaN]}'))
    with pytest.raises(RewardError, match="reward r: row 8 of the data: returned the score nan"):
        reward.score([rollout("a", 6), rollout("b", 7)])


def test_a_row_that_json_cannot_carry_is_named(ask):
    _, reward = ask()
    with pytest.raises(RewardError, match=r"rewards.r.url: row 4 of the data cannot be sent as JSON: Out of range float"):
        reward.score([rollout("a", 3, level=math.nan)])


def test_the_token_must_be_there():
    with pytest.raises(UserError, match=r"rewards.r.token_variable: the environment variable NO_SUCH_TOKEN is not set"):
        UrlReward(Reward(name="r", url="http://127.0.0.1:1", token_variable="NO_SUCH_TOKEN")).start()


@pytest.mark.parametrize("url", ["http://", "http://[::1"])
def test_a_url_must_be_one(url):
    with pytest.raises(UserError, match=r"rewards.r.url: "):
        UrlReward(Reward(name="r", url=url)).start()


@pytest.mark.slow
def test_an_outage_pauses_and_loses_nothing(ask):
    script = Script()
    with Serving(script.app) as first:
        reward = UrlReward(Reward(name="r", url=first.url))
        assert reward.score([rollout("ab")]).scores == (2.0,)
    answered = []
    threads = [threading.Thread(target=lambda i=i: answered.append(reward.score([rollout("x" * i)]).scores)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not answered
    with Serving(script.app, first.port):
        for thread in threads:
            thread.join(10)
    assert sorted(answered) == [(1.0,), (2.0,), (3.0,)]
    reward.close()


def test_an_outage_has_an_end(ask):
    reward = UrlReward(Reward(name="r", url="http://127.0.0.1:1", outage=0.1))
    with pytest.raises(RewardError, match=r"rewards.r.url: no answer for 0.1 s; at last ConnectError: "):
        reward.score([rollout("a")])


@pytest.mark.slow
def test_a_slow_server_is_asked_again(ask):
    waits = iter([1.0])
    app = FastAPI()

    @app.post("/")
    def answer() -> dict:
        time.sleep(next(waits, 0))
        return {"scores": [0.5]}

    with Serving(app) as serving:
        reward = UrlReward(Reward(name="r", url=serving.url, timeout=0.2))
        assert reward.score([rollout("a")]).scores == (0.5,)
        reward.close()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
def test_the_time_limit_is_the_whole_answers(head):
    """A server that drips, in its head or in its body, does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def drip() -> None:
            while not ended.is_set():
                with suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(head)
                        while not ended.wait(0.05):
                            connection.sendall(b"H")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        reward = UrlReward(Reward(name="r", url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.3, outage=0.1))
        start = time.monotonic()
        with pytest.raises(RewardError, match=r"no answer for 0.1 s; at last TimeoutError: no whole answer within 0.3 s"):
            reward.score([rollout("a")])
        assert time.monotonic() - start < 2
        reward.close()
        ended.set()
        thread.join(5)


def test_closing_ends_a_request():
    """Of a server that takes it and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reward, ended = UrlReward(Reward(name="r", url=f"http://127.0.0.1:{listening.getsockname()[1]}")), []

        def call() -> None:
            try:
                reward.score([rollout("a")])
            except CallClosed:
                ended.append(True)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.1)
        reward.close()
        reward.close()
        thread.join(5)
        assert ended == [True]
        with pytest.raises(CallClosed):
            reward.score([rollout("a")])


def test_closing_ends_the_wait(monkeypatch):
    reward, ended = UrlReward(Reward(name="r", url="http://127.0.0.1:1")), []

    def call() -> None:
        try:
            reward.score([rollout("a")])
        except CallClosed:
            ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)
    reward.close()
    thread.join(5)
    assert ended == [True]
