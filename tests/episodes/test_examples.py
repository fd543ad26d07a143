"""The examples, played by scripted models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conveyor.episodes import Turn, load_rollout_function
from conveyor.rewards import load_function
from conveyor.rewards.functions import find_function

EXAMPLES = Path(__file__).parents[2] / "examples" / "multi_turn"


class Script:
    """A model that says one thing after the other, and keeps what it was told."""

    def __init__(self, *turns: str) -> None:
        self._turns, self.told = list(turns), list[Any]()

    async def __call__(self, observation: Any = None, **settings: Any) -> Turn:
        self.told.append(observation)
        return Turn(self._turns.pop(0), [], "stop")


def play(name: str, script: Script, **columns: Any) -> Any:
    function = load_rollout_function(f"{EXAMPLES / name}.py:rollout", "k", list(columns))
    return asyncio.run(function(prompt="p", generate=script, **columns))


def example(name: str, function: str) -> Callable[..., Any]:
    return load_function(f"{EXAMPLES / name}.py:{function}", "k")


def test_calculator() -> None:
    script = Script("First <calc>12 * 7</calc>", "and <calc>(84 - 1)/2</calc>", "answer: 41.5")
    assert play("calculator", script) == {"calls": 2}
    assert script.told == [None, " = 84\n", " = 41.5\n"]
    reward = example("calculator", "reward")
    completions = ["answer: 41.5", "answer: 7 … Answer: 1,024.", [{"role": "assistant", "content": "answer: -3"}], "41.5"]
    assert reward(prompts=[], completions=completions, answer=["41.5", "1024", "-3", "41.5"]) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"), ("-(1/3)*3", "-1"), ("10/4", "2.5"), ("0.1 + 0.2", "0.3"), ("1/3", "0.3333333333"),
        ("1/0", "error: division by zero"), ("1e999", "error: a number is too large"), ("9" * 99, "error: a number is too large"),
        ("*".join(["1e29"] * 15) + "/7", "error: a number is too large"), ("*".join(["9" * 9] * 10), "9" * 3),
        ("2 ** 9", "error: only"), ("__import__('os')", "error: only"), ("'a' * 9", "error: only"), ("True + 1", "error: only"),
        ("7j", "error: only"), ("", "error: this is no"), ("(" * 99, "error: this is no"), ("1" * 101, "error: more than 100"),
    ],
)  # fmt: skip
def test_the_calculator_calculates_and_does_nothing_else(expression: str, result: str) -> None:
    calculator = find_function(f"{EXAMPLES / 'calculator'}.py:calculator", "k")
    assert calculator(expression).startswith(result)


@pytest.fixture(scope="module")
def game() -> None:
    pytest.importorskip("reasoning_gym")


def test_game(game: None) -> None:
    script = Script("I think\n3 * 4 + 1", "(4 + 1) * 5", "(4 + 1) * 3 = 15")
    assert play("game", script, numbers=[3, 4, 1], target=15) == {"guess": "(4 + 1) * 3", "tries": 3}
    said = [message["content"] for (message,) in script.told[1:]]
    assert said == ["3 * 4 + 1 is 13, not 15. Try again.", "Use each of 3, 4, 1 once. Try again."]
    assert play("game", Script("(4+1)*3"), numbers=[3, 4, 1], target=15) == {"guess": "(4+1)*3", "tries": 1}
    assert play("game", Script("no", "3/(1-1)", "no"), numbers=[3, 1, 1], target=1) == {"guess": None, "tries": 3}


def test_the_game_is_scored_by_reasoning_gym(game: None) -> None:
    reward = example("game", "reward")
    guesses = ["(4 + 1) * 3", "3 * 4 + 1", None, "__import__('os').abort()"]
    columns = {"numbers": [[3, 4, 1]] * 4, "target": [15] * 4}
    assert reward(prompts=[], completions=[""] * 4, guess=guesses, **columns) == [1.0, 0.05, 0.01, 0.01]
    assert reward(prompts=[], completions=[""] * 4, **columns) == [0.01] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "columns"), [("calculator", {"prompt", "answer"}), ("game", {"prompt", "numbers", "target"})])
def test_rows(name: str, columns: set[str], game: None) -> None:
    code = f"import sys, runpy; sys.argv = ['x', '3']; runpy.run_path({str(EXAMPLES / name)!r} + '.py', run_name='__main__'); "
    code += "assert not {'torch', 'conveyor'} & set(sys.modules)"
    made = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {code}"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(rows) == 3 and all(set(row) == columns for row in rows)
