"""`make learn`: do the methods learn? Each raises the quickstart task's held-out accuracy, from several seeds.

    the quickstart's fine-tuned model ─▶ one run for each method and seed ─▶ accuracy before and after, on prompts met nowhere else

Writes runs/learn/summary.json, and the table and the picture of docs/methods.md. Exit status 1 where a run misses what is to be reached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from conveyor.report.progress import read_metrics
from conveyor.run_folder import RunFolder

ENOUGH = 0.10
"""Rise of held-out accuracy that every run is to reach,"""
SECONDS = 180
"""and the time it may take, start and evaluations included."""
SEEDS = (0, 1, 2)
QUICKSTART = Path("runs/quickstart")
PAGE, PICTURE = Path("docs/methods.md"), Path("docs/learn.png")
BEGIN, END = "<!-- learning: written by make learn -->", "<!-- end of learning -->"
SAMPLES = 128
"""Of a step, whatever the method."""

_GROUPS: dict[str, Any] = {"rollout": {"n_samples_per_prompt": 8}, "train": {"rollout_batch_size": SAMPLES // 8}}
_TWO_UPDATES: dict[str, Any] = {"rollout": {"n_samples_per_prompt": 8},
                                "train": {"rollout_batch_size": SAMPLES // 8, "train_batch_size": SAMPLES // 2}}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "grpo": _GROUPS | {"algorithm": {"kl_coef": 0.02}},
    "rloo": {"rollout": {"n_samples_per_prompt": 4}, "train": {"rollout_batch_size": SAMPLES // 4}, "algorithm": {"kl_coef": 0.02}},
    "reinforce_pp": {"train": {"rollout_batch_size": SAMPLES}, "algorithm": {"kl_coef": 0.02}},
    "dapo": _TWO_UPDATES | {"algorithm": {"overlong_buffer": 2, "overlong_penalty": 0.5}},
    "gspo": _TWO_UPDATES,
    "ppo": {"train": {"rollout_batch_size": SAMPLES, "critic_learning_rate": 1e-3},
            "algorithm": {"kl_coef": 0.02, "normalize": "streaming_exact"}},
}  # fmt: skip
"""Method → what its recipe says beside the rest, which is the same for all."""


@dataclass(frozen=True)
class Run:
    method: str
    seed: int
    before: float
    """Held-out accuracy: share of prompts answered exactly right, one sample each at temperature 1."""
    after: float
    seconds: float
    """Of the whole command."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's samples."""

    @property
    def gain(self) -> float:
        return self.after - self.before


def recipe(method: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """The recipe of one run, as a mapping."""
    made: dict[str, Any] = {
        "method": method, "seed": seed, "output_dir": str(folder / f"{method}_{seed}"), "overwrite": True,
        "model": {"path": str(QUICKSTART / "sft")},
        "data": {"path": str(QUICKSTART / "data" / "prompts.jsonl"), "max_prompt_length": 32},
        "rewards": [{"name": "exact", "function": "examples/exact_answer.py:reward"}],
        "rollout": {"max_response_length": 12}, "algorithm": {},
        "train": {"steps": steps, "learning_rate": 3e-4}, "pipeline": {"micro_batch_size": 32},
        "evaluate": {"path": str(QUICKSTART / "data" / "heldout.jsonl"), "every": steps, "in_bubbles": False},
        "devices": {"rollout": 1, "train": 1}, "roles": {"score": "train"},
    }  # fmt: skip
    for key, value in METHODS[method].items():
        made[key] = made.get(key, {}) | value
    return made


def train(method: str, seed: int, folder: Path, steps: int) -> Run:
    """One run, as a user would start it."""
    file = folder / "recipes" / f"{method}_{seed}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    written = recipe(method, seed, folder, steps)
    file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "conveyor.cli", "train", str(file)], capture_output=True, text=True)
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"{method}, seed {seed}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    run = RunFolder(written["output_dir"])
    accuracy = [line["eval/pass@1"] for line in read_metrics(run.evaluations)]
    rewards = [line["reward/exact"] for line in read_metrics(run.metrics)]
    return Run(method, seed, accuracy[0], accuracy[-1], seconds, rewards)


def markdown(runs: list[Run], steps: int) -> str:
    """The table of docs/methods.md."""
    lines = [
        f"Held-out accuracy of the quickstart's task, {steps} steps of {SAMPLES} samples, {len({run.seed for run in runs})} seeds each; "
        "seconds are those of the whole command on two CPU cores.",
        "",
        "| method | before | after, by seed | least gain | seconds, most |",
        "|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(run.method for run in runs):
        of = [run for run in runs if run.method == method]
        after = " · ".join(f"{run.after:.3f}" for run in of)
        before = statistics.mean(run.before for run in of)
        lines.append(f"| `{method}` | {before:.3f} | {after} | {min(run.gain for run in of):+.3f} | {max(run.seconds for run in of):.0f} |")
    return "\n".join([*lines, "", "![mean reward by step, and held-out accuracy before and after](learn.png)"])


def draw(runs: list[Run], file: Path) -> None:
    """Left: mean reward of each step, by method. Right: held-out accuracy before and after, a dot a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    methods = list(dict.fromkeys(run.method for run in runs))
    for place, method in enumerate(methods):
        of, color = [run for run in runs if run.method == method], f"C{place}"
        curves = list(zip(*(run.rewards for run in of), strict=True))
        means = [statistics.mean(step) for step in curves]
        left.plot(range(1, len(means) + 1), means, color=color, label=method)
        left.fill_between(range(1, len(means) + 1), [min(s) for s in curves], [max(s) for s in curves], color=color, alpha=0.12, lw=0)
        right.scatter([place] * len(of), [run.before for run in of], color="0.6", marker="_", s=120)
        right.scatter([place] * len(of), [run.after for run in of], color=color, s=22)
    left.set(xlabel="step", ylabel="mean reward of the samples", ylim=(0, 1))
    left.legend(fontsize=8, frameon=False)
    right.set_xticks(range(len(methods)), methods, rotation=20, ha="right", fontsize=8)
    right.set(ylabel="held-out accuracy", ylim=(0, 1), title="grey: before · dots: after, one a seed")
    right.title.set_fontsize(9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def insert(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Between the marks of a page."""
    whole = page.read_text(encoding="utf-8")
    head, _, rest = whole.partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"{page} has no place for the results"
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}; default: all, and the page is written")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output-dir", default="runs/learn", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="keep the runs that summary.json has")
    known = parser.parse_args(arguments)
    if unknown := sorted(set(known.methods) - set(METHODS)):
        parser.error(f"no method here is named {unknown[0]}; one of {', '.join(METHODS)}")
    if not (QUICKSTART / "summary.json").is_file():
        subprocess.run([sys.executable, "-m", "conveyor.cli", "quickstart", "--output-dir", str(QUICKSTART)], check=True)
    folder = Path(known.output_dir)
    kept, runs = _kept(folder / "summary.json", known.steps) if known.resume else {}, list[Run]()
    for method in known.methods or METHODS:
        for seed in known.seeds:
            run = kept.get((method, seed)) or train(method, seed, folder, known.steps)
            runs.append(run)
            print(f"{method:13} seed {seed}: {run.before:.3f} → {run.after:.3f} ({run.gain:+.3f}) in {run.seconds:.0f} s", flush=True)
            missed = _write(folder / "summary.json", runs, known.steps)
    if not known.methods:
        draw(runs, PICTURE)
        insert(PAGE, markdown(runs, known.steps))
    print(f"{folder}/summary.json" + "".join(f"\nmissed: {name}" for name in missed))
    return 1 if missed else 0


def _write(file: Path, runs: list[Run], steps: int) -> list[str]:
    """The runs so far; returns the names of those that miss what is to be reached."""
    missed = [f"{run.method}, seed {run.seed}" for run in runs if run.gain < ENOUGH or run.seconds > SECONDS]
    summary = {"steps": steps, "samples_per_step": SAMPLES, "to_reach": {"gain": ENOUGH, "seconds": SECONDS}, "missed": missed,
               "runs": [asdict(run) for run in runs]}  # fmt: skip
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return missed


def _kept(file: Path, steps: int) -> dict[tuple[str, int], Run]:
    """(method, seed) → its run, of an earlier start with as many steps."""
    if not file.is_file():
        return {}
    summary = json.loads(file.read_text(encoding="utf-8"))
    return {(run["method"], run["seed"]): Run(**run) for run in summary["runs"]} if summary["steps"] == steps else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
