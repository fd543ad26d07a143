"""Bad input is one clear line on stderr and exit status 2, before any model is loaded; nothing is written."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.cli import main
from tests.tiny import save_tiny_policy, tiny_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("cli") / "policy")


@pytest.fixture
def recipe(policy: Path, tmp_path: Path) -> Callable[..., Path]:
    """`recipe({"dotted.key": value})` writes a sound GRPO recipe with these changes."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one", "answer": 1}\n{"prompt": "two", "answer": 2}\n')
    (tmp_path / "rewards.py").write_text("def length(prompts, completions, **columns):\n    return [len(c) for c in completions]\n")

    def write(changes: dict[str, Any] | None = None, method: str = "grpo") -> Path:
        raw: dict[str, Any] = {
            "method": method,
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(policy)},
            "data": {"path": str(tmp_path / "prompts.jsonl"), "max_prompt_length": 32},
            "rewards": [{"name": "length", "function": f"{tmp_path / 'rewards.py'}:length"}],
            "devices": {"rollout": 1, "score": 0.5, "train": 0.5},
        }
        if method == "sft":
            raw = {key: raw[key] for key in ("method", "output_dir", "model", "data")}
        for key, value in (changes or {}).items():
            *sections, last = key.split(".")
            place = raw
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    """Runs `conveyor …`, which must refuse; returns its line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("conveyor: ")
    assert not (tmp_path / "run").exists()
    return captured.err


def test_a_sound_recipe_checks(recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe())]) == 0
    assert "sound" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train.stpes": 3}, "train.stpes: unknown key"),
        ({"train.steps": "three"}, "train.steps: Input should be a valid integer"),
        ({"model.path": "./nowhere"}, "model.path: "),
        ({"reference": {"path": "./nowhere"}}, "reference.path: "),
        ({"data.path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"rewards": [{"name": "x", "function": "nowhere.py:reward"}]}, "nowhere.py"),
        ({"rewards": [{"name": "x", "function": "rewards.py"}]}, "rewards.x.function"),
        ({"rewards": [{"name": "x", "model": "./nowhere"}]}, "rewards.x.model: "),
        ({"data.max_prompt_length": 4}, "max_prompt_length"),
        ({"data.max_prompt_length": 4, "data.on_long": "error"}, "max_prompt_length"),
        ({"devices": {"rollout": 900, "score": 1, "train": 1}}, "asked for 902 CPU cores"),
    ],
)
def test_refusals(
    command: str, changes: dict[str, Any], says: str, recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert says in refused(capsys, tmp_path, command, str(recipe(changes)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "prompts.jsonl"),
        (b'{"prompt": "one"}\n{"prompt": \n', "prompts.jsonl:2"),
        (b'{"prompt": "one"}\n{"promt": "two"}\n', "prompts.jsonl:2"),
        (b'{"prompt": "one"}\n{"prompt": 3}\n', "prompts.jsonl:2"),
        (b'{"prompt": "\xff"}\n', "prompts.jsonl:1"),
    ],
)
def test_bad_rows_name_file_and_line(
    content: bytes, says: str, recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = recipe()
    (tmp_path / "prompts.jsonl").write_bytes(content)
    assert says in refused(capsys, tmp_path, "train", str(path))


@pytest.mark.parametrize("missing", ["pad_token", "chat_template"])
def test_a_tokenizer_that_lacks_something(
    missing: str, recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, missing, None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    line = refused(capsys, tmp_path, "train", str(recipe({"model.tokenizer": str(tmp_path / "tokenizer")})))
    assert missing.replace("_", " ") in line.replace("_", " ")


def test_overrides_and_arguments(recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(recipe())
    assert "train.stpes: unknown key" in refused(capsys, tmp_path, "train", path, "--train.stpes", "3")
    assert "needs a value" in refused(capsys, tmp_path, "train", path, "--train.steps")
    assert "unknown argument" in refused(capsys, tmp_path, "train", path, "train.steps=3")
    assert "no such recipe file" in refused(capsys, tmp_path, "train", "nowhere.yaml")
    assert "name a recipe" in refused(capsys, tmp_path, "train")


def test_an_older_run_is_not_touched(recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert main(["train", str(recipe())]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_help_lists_every_key_of_the_method(recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", str(recipe())]) == 0
    text = capsys.readouterr().out
    assert "--rollout.n_samples_per_prompt  (int; default 8)" in text and "--pipeline.max_staleness" in text
    assert main(["train", "--help", str(recipe(method="sft"))]) == 0
    assert "--pipeline" not in capsys.readouterr().out


def test_a_request_to_end_is_like_ctrl_c(
    recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    def run(_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            ended.append("in order")

    monkeypatch.setattr("conveyor.pipeline.loop.run_online", run)
    assert main(["train", str(recipe())]) == 130
    assert (capsys.readouterr().err, ended) == ("conveyor: interrupted\n", ["in order"])
    assert signal.getsignal(signal.SIGTERM) is before

    def ray_ends(_: object) -> None:
        sys.exit(signal.SIGTERM)  # as Ray's own handler does

    monkeypatch.setattr("conveyor.pipeline.loop.run_online", ray_ends)
    assert main(["train", str(recipe())]) == 130
