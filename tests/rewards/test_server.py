"""`conveyor serve-reward`: the scores of the score stage, batches of several requests, limits, the token."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from conveyor.cli import main
from conveyor.config.sections import Model, Reward
from conveyor.data.packing import lay_out
from conveyor.models.scalar_model import load_scalar_model, sequence_scores
from conveyor.rewards import server
from conveyor.rewards.client import UrlReward
from conveyor.rewards.server import FunctionScorer, Limits, ModelScorer, create_app
from conveyor.workers.score import reencode
from tests.rewards.rollouts import rollout
from tests.rewards.serving import Serving
from tests.tiny import save_tiny_reward_model

SAMPLES = Path(__file__).with_name("samples.py")
LIMITS = Limits(request_bytes=10_000, samples=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "reward")


@pytest.fixture
def scorer(folder):
    made = ModelScorer(str(folder), max_batch=4, dtype="float32", device="cpu", apply_chat_template=True, most_waiting=64)
    yield made
    made.close()


def post(app, *bodies, headers=None) -> list[httpx.Response]:
    """Answers of requests that come at the same time."""

    async def all_of() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://reward") as client:
            kinds = [{"content": body} if isinstance(body, bytes) else {"json": body} for body in bodies]
            return await asyncio.gather(*(client.post("/", headers=headers, **kind) for kind in kinds))

    return asyncio.run(all_of())


def test_scores_are_those_of_the_score_stage(folder, scorer):
    """Texts and messages, cut and whole; each in a batch equals the row alone (case 11)."""
    chat = ({"role": "user", "content": "2+2="},)
    cut = rollout("nineteen and so on")
    object.__setattr__(cut, "finish_reason", "length")
    samples = [rollout("4"), rollout("five", messages=chat), cut, rollout(""), rollout("4" * 40)]
    model, tokenizer = load_scalar_model(Model(path=str(folder))).eval(), AutoTokenizer.from_pretrained(folder)
    expected = []
    for sample in samples:
        prompt, response = reencode(sample, tokenizer, True)
        expected.append(sequence_scores(model, lay_out([prompt + response], packed=True)).item())
    with Serving(create_app(scorer, LIMITS, None)) as serving:
        reward = UrlReward(Reward(name="r", url=serving.url))
        assert reward.score(samples).scores == pytest.approx(expected, abs=1e-5)
        reward.close()


def test_requests_that_come_together_share_batches_sorted_by_length(scorer, monkeypatch):
    batches, score = [], scorer._score
    monkeypatch.setattr(scorer, "_score", lambda batch: (batches.append([len(ids) for _, ids in batch]), score(batch)))
    app = create_app(scorer, LIMITS, None)
    alone = [post(app, {"prompts": ["p"], "completions": [text]})[0].json()["scores"] for text in ("a" * 30, "b", "c" * 31, "d", "e")]
    batches.clear()
    together = post(app, *({"prompts": ["p"] * 2, "completions": ["b", "c" * 31]} for _ in range(4)))
    for response in together:
        assert response.json()["scores"] == pytest.approx([alone[1][0], alone[2][0]], abs=1e-5)
    assert sum(map(len, batches)) == 8 and max(map(len, batches)) > 2
    assert all(lengths == sorted(lengths) for lengths in batches)


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"{", 422, "the body is not JSON: "),
        (b"[" * 5000, 422, "the body is not JSON: "),
        (b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}", 422, "the body is nested more than 64 deep"),
        (b'{"prompts": ["p"], "completions": ["\\ud800"]}', 422, "the body is not JSON: .*surrogates not allowed"),
        (b'{"prompts": ["p"], "completions": ["a"], "column": ["\\ud800"]}', 422, "the body is not JSON: .*surrogates not allowed"),
        (b"[1]", 422, "the body: Input should be a valid dictionary"),
        ({"completions": ["a"]}, 422, "prompts: Field required"),
        ({"prompts": [], "completions": []}, 422, "prompts: List should have at least 1 item"),
        ({"prompts": ["p"], "completions": []}, 422, "completions: 0 for 1 prompts"),
        ({"prompts": ["p"], "completions": [4]}, 422, "completions.0: Input should be a valid string"),
        ({"prompts": [[]], "completions": ["a"]}, 422, "prompts: one of them has no messages"),
        ({"prompts": ["p"], "completions": [[{"role": "assistant", "content": None}]]}, 422, "completions: each is a text, or one message"),
        ({"prompts": ["p"], "completions": ["a"], "truncated": [True, False]}, 422, "truncated: 2 for 1 prompts"),
        ({"prompts": ["p"], "completions": ["a" * 3000]}, 422, r"a sample has 30\d\d tokens, the model takes"),
        ({"prompts": ["p"] * 9, "completions": ["a"] * 9}, 413, "9 samples in one request; at most 8"),
        ({"prompts": ["p" * 20_000], "completions": ["a"]}, 413, "more than 10000 bytes in one request"),
    ],
)
def test_what_is_refused_is_told_in_one_line(scorer, body, status, detail):
    (response,) = post(create_app(scorer, LIMITS, None), body)
    assert response.status_code == status
    assert re.match(detail, response.json()["detail"]) and "\n" not in response.json()["detail"]


def test_a_bad_sample_spoils_no_other_request(scorer):
    good, bad = post(
        create_app(scorer, LIMITS, None), {"prompts": ["p"], "completions": ["a"]}, {"prompts": ["p"], "completions": ["a" * 3000]}
    )
    assert (good.status_code, bad.status_code) == (200, 422)


def test_a_model_that_overflows_is_told(scorer, monkeypatch):
    monkeypatch.setattr(server, "sequence_scores", lambda model, tokens: torch.full((len(tokens.lengths),), float("nan")))
    (response,) = post(create_app(scorer, LIMITS, None), {"prompts": ["p"], "completions": ["a"]})
    assert (response.status_code, response.json()["detail"]) == (422, "the model's score of a sample is nan")


def test_too_much_waiting_is_to_come_again(folder):
    small = ModelScorer(str(folder), max_batch=4, dtype="float32", device="cpu", apply_chat_template=True, most_waiting=1)
    (response,) = post(create_app(small, LIMITS, None), {"prompts": ["p"] * 2, "completions": ["a"] * 2})
    small.close()
    assert response.status_code == 503 and "come again later" in response.json()["detail"]


def test_the_token_is_asked_for(scorer):
    app, body = create_app(scorer, LIMITS, "s3cret"), {"prompts": ["p"], "completions": ["a"]}
    for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"authorization": "Bearer s3cret2"}):
        (response,) = post(app, body, headers=headers)
        assert response.status_code == 401
    (response,) = post(app, b"x" * 20_000)
    assert response.status_code == 401  # before a byte of the body is looked at
    (response,) = post(app, body, headers={"authorization": "Bearer s3cret"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines; name a token"),
        (["MODEL", "--host", "reward.example"], "--host: reward.example can be reached"),
        (["MODEL", "--token-variable", "NO_SUCH_TOKEN"], "--token-variable: the environment variable NO_SUCH_TOKEN is not set"),
        (["MODEL", "--max-batch", "0"], "--max-batch: must be more than 0"),
        (["MODEL", "--port", "99999"], "--port: 99999 is not one of 0 … 65535"),
        (["./no/such/model", "--port", "0"], "MODEL: ./no/such/model: no such model folder"),
        (["nowhere.py:reward", "--port", "0"], "MODEL: no such file nowhere.py"),
        (["MODEL", "--ports", "1"], "serve-reward: --ports: unknown argument"),
        (["MODEL", "--port", "0", "--device", "cuda:99"], "--device: cuda:99: "),
    ],
)
def test_bad_commands_are_one_line(capsys, arguments, message):
    if "cuda:99" in arguments and torch.cuda.device_count() > 99:
        pytest.skip("this machine has that device")
    assert main(["serve-reward", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve-reward", "MODEL", "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.slow
def test_functions_are_served_as_they_are():
    scorer = FunctionScorer(f"{SAMPLES}:exact", timeout=5)
    with Serving(create_app(scorer, LIMITS, None)) as serving:
        reward = UrlReward(Reward(name="r", url=serving.url))
        assert reward.score([rollout("4", answer="4"), rollout("5", answer="4"), rollout("6")]).scores == (1.0, 0.0, None)
        reward.close()
        body = {"prompts": ["p"], "completions": ["a"], "answer": 4}
        bad = httpx.post(serving.url, json=body)
        assert bad.status_code == 422 and "the function raised TypeError" in bad.json()["detail"]
    scorer.close()
    slow = FunctionScorer(f"{SAMPLES}:sleeps", timeout=0.3)
    (response,) = post(create_app(slow, LIMITS, None), {"prompts": ["p"], "completions": ["sleep"]})
    assert response.status_code == 504 and response.json()["detail"] == "the function: no answer within 0.3 s"
    slow.close()


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(folder):
    environment = os.environ | {"REWARD_TOKEN": "s3cret", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "conveyor.cli", "serve-reward", str(folder), "--port", "0", "--token-variable", "REWARD_TOKEN"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r"serving .* on (http://127.0.0.1:\d+)\n", line).group(1)
        assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"}
        body = {"prompts": ["2+2="], "completions": ["4"]}
        assert httpx.post(url, json=body).status_code == 401
        answer = httpx.post(url, json=body, headers={"authorization": "Bearer s3cret"})
        assert isinstance(answer.json()["scores"][0], float)
    finally:
        process.terminate()
        process.wait(20)
