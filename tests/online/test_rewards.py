"""Rewards that are functions or urls in whole runs: judged sample by sample while engines go on, and an outage loses nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


class _Server:
    """A reward server that stays away for a while after its first answers. A response's score is its number of vowels."""

    def __init__(self, answers: int, away: float) -> None:
        self.scored: list[str] = []
        self.refused = 0
        self._answers, self._away, self._left = answers, away, None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if server.is_away():
                    server.refused += 1
                    self.send_error(503, "restarting")
                    return
                server.scored += body["completions"]
                answer = json.dumps({"scores": [sum(c in "aeiou" for c in text) for text in body["completions"]]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"

    def is_away(self) -> bool:
        if len(self.scored) < self._answers:
            return False
        self._left = self._left or time.monotonic()
        return time.monotonic() < self._left + self._away


@contextmanager
def serving(answers: int, away: float) -> Iterator[_Server]:
    made = _Server(answers, away)
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()


def test_an_outage_of_a_reward_server_pauses_the_run_and_loses_nothing(make_recipe: Any, run: Any, caplog: Any) -> None:
    with serving(answers=10, away=2.5) as server:
        reward = {"name": "vowels", "url": server.url, "batch_size": 4, "outage": 60}
        finished = run(make_recipe("grpo", "outage", {"rewards": [reward], "train.steps": 2}))
    assert server.refused > 0, "the run never met the outage"
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rewards.vowels.url: ")]
    assert len(told) == 2 and "does not answer: 503" in told[0] and "answers again" in told[1], "the user is told"
    rows = [json.loads(line) for line in finished.folder.samples.read_text().splitlines()]
    assert len(rows) == 2 * 6 * 4 == len(server.scored), "each sample is judged once"
    assert all(row["rewards"]["vowels"] == sum(c in "aeiou" for c in row["response"]) for row in rows)
    assert [row["samples/unscored"] for row in finished.rows] == [0, 0]


def test_a_slow_function_is_asked_while_the_engine_samples(make_recipe: Any, run: Any, tmp_path: Path) -> None:
    """Its first answer comes before the step's last sample, and it is asked sample by sample."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(prompts, completions):\n    time.sleep(0.05)\n    return [float(len(text)) for text in completions]\n"
    )
    reward = {"name": "slow", "function": f"{tmp_path / 'slow.py'}:slow", "batch_size": 1, "workers": 2}
    finished = run(make_recipe("grpo", "slow", {"rewards": [reward], "train.steps": 2, "algorithm.kl_coef": 0.0,
                                                "devices": {"rollout": 1, "train": 1}}))  # fmt: skip
    events = [json.loads(line) for line in finished.folder.events.read_text().splitlines()]
    for step in (1, 2):
        rollouts = [event for event in events if event["task"] == "rollout" and event["step"] == step]
        judged = [event for event in events if event["task"] == "judge" and event["step"] == step]
        assert sorted(map(tuple, (event["samples"][0] for event in judged))) == sorted(tuple(event["samples"][0]) for event in rollouts)
        assert min(event["end"] for event in judged) < max(event["end"] for event in rollouts)
    assert not any(name.startswith("idle/rewards") for name in finished.rows[0]), "it is no device"


def test_a_greedy_baseline_is_sampled_and_judged_and_not_trained(make_recipe: Any, run: Any, prompts_file: Path) -> None:
    """ReMax, with a greedy answer to held-out prompts too."""
    changes = {
        "rollout.n_samples_per_prompt": 2, "train.steps": 2, "pipeline.micro_batch_size": 5,
        "evaluate": {"path": str(prompts_file), "max_prompts": 4, "n_samples_per_prompt": 2, "greedy": True, "pass_at": [1, 2],
                     "success_threshold": 0.0, "in_bubbles": False},
    }  # fmt: skip
    finished = run(make_recipe("remax", "remax", changes))
    rows = [json.loads(line) for line in finished.folder.samples.read_text().splitlines()]
    greedy = [row for row in rows if row["sample"] == 2]
    assert len(rows) == 2 * 6 * 3 and len(greedy) == 12
    assert all(row["advantage"] is None for row in greedy) and all(row["advantage"] is not None for row in rows if row["sample"] < 2)
    assert [row["samples"] for row in finished.rows] == [12, 12]
    for row in (row for row in rows if row["sample"] < 2):
        (baseline,) = [other["score"] for other in greedy if (other["step"], other["group"]) == (row["step"], row["group"])]
        # Without discount the advantage of the last token is score − baseline less its KL; the mean over tokens lies near.
        assert abs(row["advantage"] - (row["score"] - baseline)) < 0.2
    lines = [json.loads(line) for line in finished.folder.evaluations.read_text().splitlines()]
    assert [line["eval/prompts"] for line in lines] == [4, 4, 4] and all(line["eval/samples"] == 8 for line in lines)
    assert all(0 <= line["eval/pass@1"] <= line["eval/pass@2"] <= 1 for line in lines)
    assert all("eval/greedy/reward/vowels" in line for line in lines)
