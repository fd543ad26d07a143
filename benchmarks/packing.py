"""The train stage of GRPO and PPO with and without padding: same samples, model, micro-batches and optimizer; by turns, in one process."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.results import Result, Say, median

SEED = 7
STEP, MICRO_BATCH = 64, 8
"""Samples of an update, and of a micro-batch."""
PROMPT = 32
MEDIAN, SIGMA, SHORTEST, LONGEST = 120, 0.8, 4, 512
"""Tokens of a response: lognormal, cut at both ends."""
ROUNDS = 3
MODEL: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
    tie_word_embeddings=True, max_position_embeddings=PROMPT + LONGEST,
)  # fmt: skip
"""The output layer has a fifteenth of a token's work, as that of an 8B model."""
TARGET = 1.5


def run(folder: Path, say: Say) -> list[Result]:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        model = _save_model(Path(scratch) / "model")
        for method in ("grpo", "ppo"):
            turns = {name: _turn(method, model, name == "packed") for name in ("padded", "packed")}
            rates: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in turns}
            for number in range(ROUNDS + 1):
                for name, turn in turns.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    tokens = turn()
                    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                    say(f"round {number}: {method} {name} {tokens / spent['wall']:,.0f} tokens/s")
                    if number:  # the first turn of each warms up
                        for clock, seconds in spent.items():
                            rates[name][clock].append(tokens / seconds)
            ratio = {clock: median(rates["packed"][clock]) / median(rates["padded"][clock]) for clock in ("wall", "cpu")}
            what = f"{method.upper()}, train stage without padding: times the real tokens/s with it"
            results.append(Result(f"packing_{method}", what, ratio["wall"], TARGET, details={"by_cpu_time": ratio["cpu"], "rates": rates}))
    return results


def lengths() -> list[int]:
    drawn = np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, STEP)
    return [int(length) for length in drawn.clip(SHORTEST, LONGEST)]


def _save_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from conveyor.quickstart.base_model import train_tokenizer

    tokenizer = train_tokenizer(["a b c"])
    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(**MODEL, pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _turn(method: str, model: Path, packed: bool) -> Callable[[], int]:
    """One update: prepare, forward and backward of every micro-batch, optimizer step; returns the samples' tokens."""
    from conveyor.config import OnlineRecipe, parse_recipe
    from conveyor.pipeline.ledger import Ledger
    from conveyor.types import PartialScores, Prompt, Rollout
    from conveyor.workers.reports import MicroBatchKey
    from conveyor.workers.train import TrainWorker

    n = 8 if method == "grpo" else 1
    recipe = parse_recipe({
        "method": method, "output_dir": "none", "model": {"path": str(model), "remove_padding": packed}, "data": {"path": "none"},
        "rewards": [{"name": "r", "function": "none.py:none"}], "rollout": {"n_samples_per_prompt": n, "max_response_length": LONGEST},
        "algorithm": {"kl_coef": 0.0}, "train": {"rollout_batch_size": STEP // n}, "pipeline": {"micro_batch_size": MICRO_BATCH},
    })  # fmt: skip
    assert isinstance(recipe, OnlineRecipe)
    roles = ("actor", "critic") if recipe.uses_critic else ("actor",)
    cores = tuple(os.sched_getaffinity(0))
    worker = TrainWorker(recipe, roles, rank=0, world_size=1, address="", port=0, total_updates=1000, cores=cores)
    torch.set_num_threads(1)
    rng = np.random.default_rng(SEED)
    samples = []
    for i, length in enumerate(lengths()):
        prompt = Prompt(i // n, 0, tuple(rng.integers(5, 2000, PROMPT).tolist()), "")
        ids = torch.from_numpy(rng.integers(5, 2000, length))
        samples.append(Rollout(prompt, i % n, ids, torch.zeros(length), torch.zeros(length, dtype=torch.int32), "stop", ""))
    rewards = rng.random(STEP).tolist()
    steps = iter(range(10**6))

    def turn() -> int:
        step, books = next(steps), Ledger(recipe)
        places = [range(first, first + MICRO_BATCH) for first in range(0, STEP, MICRO_BATCH)]
        keys = [MicroBatchKey(step, 0, number) for number in range(len(places))]
        settings = books.settings(0)
        for key, of_batch in zip(keys, places, strict=True):
            scores = PartialScores(rewards={"r": tuple(rewards[i] for i in of_batch)})
            books.add_reports(0, [worker.prepare(key, [samples[i] for i in of_batch], [scores], settings)])
        for key, of_batch in zip(keys, places, strict=True):
            worker.forward_backward(key, books.context(0, key, [samples[i].id for i in of_batch]), key is keys[-1])
        worker.optim_step(books.denominators(0, step, 0))
        worker.finish_step(step)
        return sum(PROMPT + len(sample.response_ids) for sample in samples)

    return turn
