"""Weights on their way: from the call of `publish` until they are installed, against copying the same bytes once.

The publisher is an actor with a model of 135M parameters in float32 (538 MB), which calls `workers.weight_sync.publish` as a train rank
does. The receivers are the real ones: a ScoreWorker's policy snapshot, and a RolloutWorker's vLLM engine. Each process has one thread.
The copy is `Tensor.copy_` of the same tensors in the publisher's process, into memory that has been written before.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.results import Result, Say, median
from benchmarks.sleeping_runs import local_ray
from conveyor.config import OnlineRecipe, parse_recipe, sections
from conveyor.quickstart.base_model import train_tokenizer
from conveyor.workers import weight_sync
from conveyor.workers.placement import Placement
from conveyor.workers.reports import Publication
from conveyor.workers.rollout import RolloutWorker
from conveyor.workers.score import ScoreWorker

WARM_UP, REPETITIONS = 4, 9
"""Versions. The first ones write to pages of the object store that no process has touched yet."""


class Publisher:
    """Holds the weights, as rank 0 of a train group does."""

    def __init__(self, model: str, core: int) -> None:
        os.sched_setaffinity(0, [core])
        torch.set_num_threads(1)
        self._weights = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
        self._writer = weight_sync.BucketWriter()
        self._copy = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}

    def copy(self) -> float:
        """Seconds of copying every tensor once."""
        start = time.perf_counter()
        with torch.no_grad():
            for name, weight in self._weights.items():
                self._copy[name].copy_(weight)
        return time.perf_counter() - start

    def publish(self, version: int) -> Publication | None:
        weights = ((name, weight.detach()) for name, weight in self._weights.items())
        return weight_sync.publish(weights, version, "actor", verify=False, writer=self._writer)


def run(folder: Path, say: Say) -> list[Result]:
    model = _make_model(folder / "sync_model")
    try:
        return _measure(model, say)
    finally:
        shutil.rmtree(model)


def _measure(model: Path, say: Say) -> list[Result]:
    seconds: dict[str, list[float]] = {"copy": [], "publish": [], "snapshot": [], "engine": []}
    with local_ray(), Placement.create({"engine": 1, "train": 1}, sections.Ray()) as placement:
        (engine_core,), (train_core,) = placement.cores("engine", 0) or (0,), placement.cores("train", 0) or (1,)
        section = sections.Model(path=str(model))
        engine = placement.actor(
            RolloutWorker, "engine", 0, share=0.5, model=section, rollout=sections.Rollout(max_response_length=64), seed=0,
            cores=(engine_core,), max_model_len=128,
        )  # fmt: skip
        scorer = placement.actor(
            ScoreWorker, "engine", 0, share=0.5, recipe=_recipe(model), roles=("policy_snapshot",), cores=(engine_core,)
        )
        publisher = placement.actor(Publisher, "train", 0, model=str(model), core=train_core)
        ray.get([engine.ready.remote(), scorer.ready.remote()])
        nbytes = 0
        for version in range(1, WARM_UP + REPETITIONS + 1):
            copied = ray.get(publisher.copy.remote())
            start = time.monotonic()
            publication = ray.get(publisher.publish.remote(version))  # the last one is held until now, as a run does
            published = time.monotonic()
            ray.get(scorer.install.remote("policy_snapshot", publication))
            in_snapshot = time.monotonic()
            ray.get(engine.install.remote(publication))
            in_engine = time.monotonic() - in_snapshot + published - start
            nbytes = publication.nbytes
            if version > WARM_UP:
                found = {"copy": copied, "publish": published - start, "snapshot": in_snapshot - start, "engine": in_engine}
                for name, value in found.items():
                    seconds[name].append(value)
                say(", ".join(f"{name} {value:.3f} s" for name, value in found.items()))
    copy = median(seconds["copy"])
    details = {"bytes": nbytes, "seconds": seconds}
    what = f"weight sync of {nbytes / 1e6:,.0f} MB into"
    return [
        Result(
            "weight_sync_snapshot", f"{what} a snapshot / one copy", median(seconds["snapshot"]) / copy, 4.0, at_most=True, details=details
        ),
        Result("weight_sync_engine", f"{what} a vLLM engine / one copy", median(seconds["engine"]) / copy, 4.0, at_most=True),
    ]


def _make_model(folder: Path) -> Path:
    """SmolLM2-135M's shape, its embedding smaller and untied; untrained."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["a"])
    config = LlamaConfig(
        vocab_size=25_000, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _recipe(model: Path) -> OnlineRecipe:
    raw: dict[str, Any] = {
        "method": "grpo",
        "output_dir": "none",
        "model": {"path": str(model)},
        "data": {"path": "none", "max_prompt_length": 64},
        "rewards": [{"name": "r", "model": "none"}],
        "rollout": {"max_response_length": 64},
        "algorithm": {"update_epochs": 2},  # several passes: old log-probs come from a snapshot
    }
    made = parse_recipe(raw)
    assert isinstance(made, OnlineRecipe)
    return made
