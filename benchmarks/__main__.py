"""`python -m benchmarks [NAME …]`: measure, print a table, write summary.json and details.json.

Exit status 0 where every number was measured, whether or not it reaches its target.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

NAMES = ("orchestration", "driver", "weight_sync", "overlap", "against_trl", "offline", "packing", "prediction")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run, of {', '.join(NAMES)}; default: all")
    parser.add_argument("--output-dir", default="runs/bench", help="default: %(default)s")
    known = parser.parse_args(arguments)
    if unknown := sorted(set(known.names) - set(NAMES)):
        parser.error(f"no benchmark is named {unknown[0]}; one of {', '.join(NAMES)}")
    _environment()

    from rich.console import Console

    from benchmarks.results import Result, machine, show, write

    console, folder = Console(), Path(known.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not known.names:
        for name in ("summary.json", "details.json"):
            (folder / name).unlink(missing_ok=True)

    def say(line: str) -> None:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    every: list[Result] = []
    for name in known.names or NAMES:
        console.print(name, style="bold")
        where, start = machine(), time.monotonic()
        results = importlib.import_module(f"benchmarks.{name}").run(folder, say)
        write(folder, results, where, time.monotonic() - start)
        every += results
    show(every, console)
    console.print(f"Numbers: {folder}/summary.json; every measurement: {folder}/details.json", highlight=False, soft_wrap=True)
    return 0


def _environment() -> None:
    """Before anything imports these libraries: no network, no usage statistics, one thread a process unless told otherwise."""
    for name, value in {
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
