"""Supervised fine-tuning and DPO here against TRL's SFTTrainer and DPOTrainer: the same tokens, model, micro-batches and optimizer.

Each side is a process of one thread (`offline_sides.py`), and only one of them works at a time: a round is one turn of each mode,
the sides by turns. Rates are of real tokens, those of the samples without padding; a ratio is that of the medians over the rounds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import offline_sides
from benchmarks.offline_sides import Facts
from benchmarks.results import Result, Say, median

ROUNDS = 3
MODES = (
    ("conveyor", "padded"), ("trl", "padded"), ("conveyor", "packed"), ("trl", "packed"), ("conveyor", "sorted"), ("trl", "padding_free"),
    ("conveyor", "dpo"), ("trl", "dpo"), ("conveyor", "dpo_reference"), ("trl", "dpo_reference"),
)  # fmt: skip
EXACT = 1e-4
"""Nats by which a token's log-probability may differ where no sample sees another."""

Rates = dict[str, dict[str, list[float]]]
"""`side/mode` → tokens a second of each round, by the clock and by the process's CPU time."""


def run(folder: Path, say: Say) -> list[Result]:
    rates, facts = _measure(say)
    details = {"tokens_per_second": rates, **facts}
    exact = ["trl/padded"] + [f"trl/{mode}" for mode in ("packed", "padding_free") if facts[f"{mode}_difference"] <= EXACT]
    best = max(exact, key=lambda mode: median(rates[mode]["wall"]))
    return [
        _result("offline_packing", "packed SFT: times the real tokens/s of padded rows", rates, "conveyor/packed", "conveyor/padded", 1.5,
                details),
        _result("offline_sft_trl", f"packed SFT: times TRL's real tokens/s ({best.removeprefix('trl/')}, its fastest)", rates,
                "conveyor/packed", best, 1.0),
        _result("offline_dpo_trl", "DPO: times TRL's real tokens/s", rates, "conveyor/dpo", "trl/dpo", 1.0),
    ]  # fmt: skip


def _result(name: str, what: str, rates: Rates, ours: str, other: str, target: float, details: Mapping[str, Any] | None = None) -> Result:
    ratios = {clock: median(rates[ours][clock]) / median(rates[other][clock]) for clock in ("wall", "cpu")}
    return Result(name, what, ratios["wall"], target, details={"by_cpu_time": ratios["cpu"], **(details or {})})


def _measure(say: Say) -> tuple[Rates, Facts]:
    """Rates, without the first round, and what the sides say of themselves."""
    rates: Rates = {f"{side}/{mode}": {"wall": [], "cpu": []} for side, mode in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        model = offline_sides.save_model(Path(scratch))
        with _side("conveyor", model, scratch) as (conveyor, ours), _side("trl", model, scratch) as (trl, theirs):
            for number in range(ROUNDS + 1):
                for side, mode in MODES:
                    pipe = conveyor if side == "conveyor" else trl
                    pipe.send(mode)
                    wall, cpu, tokens = pipe.recv()
                    say(f"round {number}: {side}/{mode} {tokens / wall:,.0f} tokens/s, {tokens / cpu:,.0f} a second of CPU time")
                    if number:  # the first turn of each warms up
                        rates[f"{side}/{mode}"]["wall"].append(tokens / wall)
                        rates[f"{side}/{mode}"]["cpu"].append(tokens / cpu)
    return rates, ours | theirs


@contextmanager
def _side(side: str, model: Path, scratch: str) -> Iterator[tuple[Connection, Facts]]:
    """A side's process, ready: its pipe and what it says of itself."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=offline_sides.serve, args=(side, str(model), scratch, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here, here.recv()
        here.send(None)
        process.join()
    finally:
        process.terminate()
        process.join()
