"""`make world`: what every method makes of the same budget of samples, in a world whose true reward is known.

Writes runs/world/summary.json and, when all methods and seeds are there, the table and the picture of docs/world.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.learn import insert
from benchmarks.sleeping_runs import local_ray
from benchmarks.world import methods, world
from benchmarks.world.page import BEGIN, END, draw, markdown
from benchmarks.world.run import Run, as_row, from_row, last_of, seed_of

SEEDS = (0, 1, 2)
PAGE, PICTURE = Path("docs/world.md"), Path("docs/world.png")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.world", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(methods.METHODS)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--output-dir", default="runs/world", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="keep the runs that summary.json has")
    known = parser.parse_args(arguments)
    if unknown := sorted(set(known.methods) - set(methods.METHODS)):
        parser.error(f"no method here is named {unknown[0]}; one of {', '.join(methods.METHODS)}")
    folder = Path(known.output_dir)
    if not known.resume:
        clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = _Summary(folder / "summary.json")
    if summary.of != fingerprint():
        parser.error(f"--resume: {folder} holds runs of another world or other settings; start anew without it")
    with local_ray():
        for seed in known.seeds:
            _seed(folder, seed, known.methods or list(methods.METHODS), summary)
    whole = {(method, seed) for method in methods.METHODS for seed in SEEDS}
    if whole <= {(run.method, run.seed) for run in summary.runs} and folder == Path("runs/world"):
        draw(summary.ordered(), PICTURE)
        insert(PAGE, markdown(summary.ordered()), BEGIN, END)
    print(f"{folder}/summary.json: {summary.seconds:.0f} s in all")
    return 0


def clear(folder: Path) -> None:
    """Remove what an earlier start made, and nothing else that the folder may hold."""
    (folder / "summary.json").unlink(missing_ok=True)
    for seed in folder.glob("seed_*"):
        shutil.rmtree(seed)


def fingerprint() -> str:
    """Of the world and the methods' settings: runs of different ones do not belong in one table."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in ("world.py", "truth.py", "methods.py", "measure.py"))).hexdigest()


def _seed(folder: Path, seed: int, wanted: list[str], summary: _Summary) -> None:
    missing = [method for method in wanted if not summary.has(method, seed)]
    if not missing:
        return
    with seed_of(folder, seed) as one:
        if not one.world.data("chosen").exists():  # the last of the files
            one.prepare()
        if not summary.has("start", seed):
            summary.add(one.start())
        for method in missing:
            summary.add(one.run(method))


class _Summary:
    """summary.json: written after every run."""

    def __init__(self, file: Path) -> None:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._file, self._began, self._before = file, time.monotonic(), float(kept.get("seconds", 0.0))
        self.of = str(kept.get("fingerprint")) if kept else fingerprint()
        self.runs = [from_row(row) for row in kept.get("runs", [])] if self.of == fingerprint() else []

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def has(self, method: str, seed: int) -> bool:
        return any((run.method, run.seed) == (method, seed) for run in self.runs)

    def add(self, run: Run) -> None:
        self.runs = last_of(self.runs, run)
        found = run.measured
        print(f"seed {run.seed} {run.method:18} true reward {found.true_reward:.3f}  exact {found.exact:.3f}  KL {found.kl:6.2f}  "
              f"{run.seconds:5.0f} s", flush=True)  # fmt: skip
        budget = {"prompts": world.PROMPTS, "samples_per_prompt": world.SAMPLES, "judged_samples": world.PROMPTS * world.SAMPLES}
        told = {
            "fingerprint": self.of, "budget": budget, "held_out_prompts": world.HELD_OUT, "seconds": round(self.seconds, 1),
            "runs": [as_row(run) for run in self.ordered()],
        }  # fmt: skip
        self._file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    def ordered(self) -> list[Run]:
        names = ["start", *methods.METHODS]
        return sorted(self.runs, key=lambda run: (names.index(run.method), run.seed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
