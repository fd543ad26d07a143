"""`conveyor quickstart`: data → untrained model → SFT → reward model → PPO → a table.

The three trainings are ordinary recipes (beside this file), run the way `conveyor train` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from conveyor.config import LoopRecipe, OfflineRecipe, OnlineRecipe, UserError, load_recipe
from conveyor.offline.run import run_offline
from conveyor.pipeline.loop import run_online
from conveyor.quickstart import task
from conveyor.quickstart.base_model import make_base_model
from conveyor.quickstart.evaluate import sample_responses
from conveyor.quickstart.memory import PeakMemory
from conveyor.report.progress import read_metrics
from conveyor.report.tables import table
from conveyor.run_folder import RunFolder
from conveyor.workers.cluster import available

RECIPES = Path(__file__).parent / "recipes"
WRITTEN_FOR = "runs/quickstart"
"""The folder that the recipes name."""
MADE = ("data", "recipes", "base", "sft", "reward", "ppo", "training", "summary.json")
MARK = ".quickstart"
"""An empty file that says a folder is the quickstart's to replace."""
ENOUGH = 0.10
"""Rise of held-out accuracy, from SFT to PPO, below which the quickstart counts as failed."""
MAX_RESPONSE_LENGTH = 12
LAST_STEPS = 3
"""Steps whose mean reward and KL stand for the trained model."""


@dataclass(frozen=True)
class Summary:
    """summary.json."""

    accuracy_base: float
    accuracy_sft: float
    accuracy_ppo: float
    reward_sft: float
    """Mean reward of the first PPO step, which the SFT model sampled."""
    reward_ppo: float
    kl: float
    """Per token, PPO to SFT."""
    reward_model_accuracy: float
    """Share of held-out pairs it orders rightly."""
    step_seconds: float
    idle: Mapping[str, float]
    """Device group → share of the PPO steps' time without work."""
    parameters: int
    seed: int
    seconds: float
    seconds_of: Mapping[str, float]
    peak_memory_gib: float

    @property
    def gain(self) -> float:
        return self.accuracy_ppo - self.accuracy_sft


def quickstart(output_dir: str = WRITTEN_FOR, seed: int = 0) -> int:
    """Run everything, print the table, write summary.json.

    Returns:
        Exit status: 0 where PPO raised held-out accuracy by `ENOUGH`, else 1.

    Raises:
        UserError: output_dir holds something that is not a quickstart's, or the machine lacks devices.
    """
    folder, console = Path(output_dir), Console()
    _claim(folder)
    _quiet()
    with PeakMemory() as memory:
        summary = _Quickstart(folder, console, seed).run(memory)
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    _print(summary, console)
    console.print(
        f"Models, data and recipes: {folder}; the PPO run's report: {folder}/training/ppo/report.html", soft_wrap=True, highlight=False
    )
    if summary.gain >= ENOUGH:
        return 0
    console.print(f"PPO raised held-out accuracy by {summary.gain:.2f}, less than {ENOUGH:.2f}: something is wrong.", highlight=False)
    return 1


class _Quickstart:
    def __init__(self, folder: Path, console: Console, seed: int) -> None:
        self.folder, self.console, self.seed = folder, console, seed
        self.seconds: dict[str, float] = {}

    def run(self, memory: PeakMemory) -> Summary:
        began = self._lap = time.monotonic()
        rows = task.generate(self.seed)
        self._write_inputs(rows)
        self._say(f"The task:  {rows['heldout'][0]['prompt']}  →  {rows['heldout'][0]['answer']}")
        texts = (f"{row['prompt']}\n{row['completion']}" for row in rows["sft"])
        parameters = make_base_model(self.folder / "base", texts, self.seed)
        base = self._accuracy("base")
        self._clock("data and base model")

        self._say(
            f"\nSFT on {len(rows['sft']):,} demonstrations, {task.SLOPPY_SHARE:.0%} of them sloppy; {parameters / 1e6:.1f}M parameters"
        )
        self._train("sft", "sft")
        sft = self._accuracy("sft")
        self._clock("SFT")

        self._say(f"\nReward model on {len(rows['pairs']):,} pairs of a right and a wrong answer")
        judged = self._train("reward_model", "reward")
        self._clock("reward model")

        self._say("\nPPO against the reward model: rollout (vLLM) and score + train (DeepSpeed) at the same time")
        self._train("ppo", "ppo")
        ppo = self._accuracy("ppo")
        self._clock("PPO")

        steps = read_metrics(RunFolder(self.folder / "training" / "ppo").metrics)
        return Summary(
            accuracy_base=base, accuracy_sft=sft, accuracy_ppo=ppo, reward_sft=steps[0]["reward/mean"],
            reward_ppo=_mean(steps[-LAST_STEPS:], "reward/mean"), kl=_mean(steps[-LAST_STEPS:], "kl"),
            reward_model_accuracy=judged["eval/accuracy"], step_seconds=_mean(steps, "time/step"), idle=_idle(steps),
            parameters=parameters, seed=self.seed, seconds=time.monotonic() - began, seconds_of=self.seconds, peak_memory_gib=memory.gib,
        )  # fmt: skip

    def _write_inputs(self, rows: Mapping[str, list[task.Row]]) -> None:
        for name in ("data", "recipes"):
            (self.folder / name).mkdir()
        for name, of_file in rows.items():
            text = "".join(json.dumps(row) + "\n" for row in of_file)
            (self.folder / "data" / f"{name}.jsonl").write_text(text, encoding="utf-8")
        for recipe in RECIPES.glob("*.yaml"):
            text = re.sub(rf"{WRITTEN_FOR}/(\S+)", lambda path: json.dumps(str(self.folder / path[1])), recipe.read_text(encoding="utf-8"))
            (self.folder / "recipes" / recipe.name).write_text(text, encoding="utf-8")

    def _train(self, name: str, model: str) -> dict[str, Any]:
        """Run the recipe `name`, keep its model under the name `model`; returns its last metrics."""
        overrides = {"seed": str(self.seed)}
        recipe = load_recipe(self.folder / "recipes" / f"{name}.yaml", overrides)
        if isinstance(recipe, OnlineRecipe) and available(recipe.ray).count < 2:
            overrides["devices"] = "{rollout: 0.5, train: 0.5}"
            recipe = load_recipe(self.folder / "recipes" / f"{name}.yaml", overrides)
        assert not isinstance(recipe, LoopRecipe)
        last = run_offline(recipe) if isinstance(recipe, OfflineRecipe) else run_online(recipe)
        shutil.copytree(RunFolder(recipe.output_dir).model, self.folder / model)
        return last

    def _accuracy(self, model: str) -> float:
        """Share of held-out prompts with exactly the right answer, sampled once each at temperature 1."""
        path = self.folder / model
        rows = [json.loads(line) for line in (self.folder / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
        responses = sample_responses(
            AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), [row["prompt"] for row in rows],
            max_response_length=MAX_RESPONSE_LENGTH, seed=self.seed,
        )  # fmt: skip
        accuracy = sum(task.is_right(response, row["answer"]) for response, row in zip(responses, rows, strict=True)) / len(rows)
        self._say(f"held-out accuracy {accuracy:.3f}, e.g. {rows[0]['prompt']}  →  {_shown(responses[0])}")
        return accuracy

    def _clock(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self._lap = now - self._lap, now

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _claim(folder: Path) -> None:
    """Make the folder ours, without what an earlier quickstart left in it.

    Raises:
        UserError: it holds something, and no quickstart made it.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir: {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UserError(f"--output-dir: {folder} holds files that no quickstart made; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    for name in MADE:
        made = folder / name
        shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)


def _shown(response: str) -> str:
    """A model that has learnt nothing yet makes tokens that are not even text."""
    return "(noise)" if "\ufffd" in response or not response.isprintable() else response


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def _idle(steps: list[dict[str, Any]]) -> dict[str, float]:
    seconds = sum(step["time/step"] for step in steps)
    names = [name for name in steps[0] if name.startswith("idle/")]
    return {name.removeprefix("idle/"): sum(step[name] * step["time/step"] for step in steps) / seconds for name in names}


def _print(summary: Summary, console: Console) -> None:
    accuracies = (summary.accuracy_base, summary.accuracy_sft, summary.accuracy_ppo)
    quality: list[list[str | None]] = [
        ["held-out accuracy (exact checker)", *(f"{accuracy:.3f}" for accuracy in accuracies)],
        ["reward in training (reward model)", None, f"{summary.reward_sft:.2f}", f"{summary.reward_ppo:.2f}"],
        ["KL to SFT in training, a token", None, "0.000", f"{summary.kl:.3f}"],
    ]
    step = summary.step_seconds
    groups = [[group, f"{(1 - idle) * step:.2f} s", f"{idle:.0%}"] for group, idle in summary.idle.items()]
    console.print()
    console.print(table("What it learnt", ["", "untrained", "after SFT", "after PPO"], quality))
    console.print(table(f"A PPO step: {step:.2f} s", ["device group", "working", "waiting (idle)"], groups))
    console.print(f"{summary.seconds:.0f} s in all, peak memory {summary.peak_memory_gib:.1f} GiB", highlight=False)


def _quiet() -> None:
    """Without other libraries' progress bars, and the warning of DeepSpeed where there is no GPU to find."""
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
