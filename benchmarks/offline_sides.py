"""The two sides of the benchmark of the offline methods: each a process that trains the same samples with the same model, by turns."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback
from transformers.utils import logging

from conveyor.config import OfflineRecipe, parse_recipe
from conveyor.data.conditional import Weighted
from conveyor.data.pairs import Pair
from conveyor.data.samples import Sample
from conveyor.models.answering import WholeModel
from conveyor.models.train_engine import TrainEngine
from conveyor.offline.dpo import DpoTask
from conveyor.offline.fit import Trainer
from conveyor.offline.reference import over_ranks
from conveyor.offline.sft import SupervisedTask
from conveyor.offline.task import Task
from conveyor.quickstart.base_model import train_tokenizer

SEED = 5
MAX_LENGTH = 512
MICRO_BATCH = 8
"""Rows of a micro-batch: samples, packed rows, or pairs."""
ROWS = {"sft": 64, "packed": 24, "dpo": 16}
"""Rows of an update; about as many tokens for packed rows as for samples."""
SAMPLES, PAIRS = 64, 16
"""Of a turn."""
MEDIAN, SIGMA, SHORTEST = 120, 0.8, 8
"""Tokens of a sample: lognormal, cut at both ends."""
PROMPT_SHARE = 1 / 3
"""Of a pair's mean length; supervised samples are learnt whole."""
MODEL: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, vocab_size=8192
)
"""With tied embeddings 1.8M parameters."""

Turn = Callable[[], int]
"""One pass over the data; returns the real tokens it trained."""
Facts = dict[str, float]


def save_model(folder: Path) -> Path:
    """An untrained model with a tokenizer, which nothing is tokenised with."""
    tokenizer = train_tokenizer(["a b c"])
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **MODEL, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def lengths(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return [int(length) for length in drawn.clip(SHORTEST, MAX_LENGTH)]


def _sample(rng: np.random.Generator, length: int, prompt: Sequence[int] = ()) -> Sample:
    """The prompt and random tokens after it, which are learnt."""
    head = np.asarray(prompt, dtype=np.int32)
    ids = np.concatenate((head, rng.integers(10, 250, length - len(head)).astype(np.int32)))
    mask = np.arange(length) >= max(1, len(head))
    return Sample(ids, mask, "random")


def supervised_samples() -> list[Sample]:
    rng = np.random.default_rng(SEED)
    return [_sample(rng, length) for length in lengths(SAMPLES, SEED)]


def pairs() -> list[Pair]:
    """Both sides' lengths are lognormal, the prompt is a share of the shorter side."""
    rng, found = np.random.default_rng(SEED), []
    for chosen, rejected in zip(lengths(PAIRS, SEED), lengths(PAIRS, SEED + 1), strict=True):
        prompt = rng.integers(10, 250, max(1, int(PROMPT_SHARE * min(chosen, rejected)))).tolist()
        found.append(Pair(_sample(rng, chosen, prompt), _sample(rng, rejected, prompt)))
    return found


def serve(side: str, model: str, folder: str, pipe: Connection) -> None:
    """Send the side's facts, then answer each name of a turn with (seconds, CPU seconds of this process, real tokens), until None comes."""
    warnings.simplefilter("ignore")
    os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    facts, turns = {"conveyor": conveyor_turns, "trl": trl_turns}[side](Path(model), Path(folder))
    pipe.send(facts)
    while (name := pipe.recv()) is not None:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = turns[name]()
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu, tokens))


# ── Conveyor ─────────────────────────────────────────────────────────────────────────────────────────


class InOrder(Trainer):
    """Micro-batches of rows as they come, as trainers that do not sort have them."""

    def _shares(self, task: Task, numbers: Sequence[int]) -> list[Sequence[int]]:
        return [numbers[first : first + MICRO_BATCH] for first in range(0, len(numbers), MICRO_BATCH)]


def conveyor_turns(model: Path, folder: Path) -> tuple[Facts, dict[str, Turn]]:
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    samples = [Weighted(sample, 1.0) for sample in supervised_samples()]
    plain = SupervisedTask.of(_recipe(model, folder, "sft", packed=False), samples)
    packed = SupervisedTask.of(_recipe(model, folder, "sft", packed=True), samples)
    paired = DpoTask(_recipe(model, folder, "dpo"), pairs())
    referenced = paired.referenced([range(PAIRS)])

    def asked() -> torch.Tensor:
        return over_ranks(reference, referenced, 2 * MICRO_BATCH)

    reference = WholeModel(paired.load_model(), torch.device("cpu"))
    paired = paired.informed(asked(), [range(PAIRS)])

    def reference_pass() -> int:
        asked()
        return sum(len(sample.ids) for sample in referenced)

    return {}, {
        "padded": _passes(InOrder, plain, ROWS["sft"]),
        "sorted": _passes(Trainer, plain, ROWS["sft"]),
        "packed": _passes(Trainer, packed, ROWS["packed"]),
        "dpo": _passes(Trainer, paired, ROWS["dpo"]),
        "dpo_reference": reference_pass,
    }


def _recipe(model: Path, folder: Path, method: str, packed: bool = True) -> OfflineRecipe:
    made = parse_recipe({
        "method": method, "output_dir": str(folder / "conveyor"), "model": {"path": str(model), "remove_padding": packed},
        "data": {"path": str(folder / "none.jsonl"), "max_length": MAX_LENGTH, "packing": packed},
        "train": {"micro_batch_size": MICRO_BATCH, "learning_rate": 1e-5, "lr_schedule": "constant", "warmup_ratio": 0.0},
    })  # fmt: skip
    assert isinstance(made, OfflineRecipe)
    return made


def _passes(kind: type[Trainer], task: Task, batch: int) -> Turn:
    train = task.recipe.train
    engine = TrainEngine(task.load_model(), train, learning_rate=train.learning_rate, total_updates=1000, dtype="float32",
                         accelerator="cpu")  # fmt: skip
    trainer, rng = kind(engine, train), random.Random(SEED)

    def turn() -> int:
        order = rng.sample(range(len(task.items)), len(task.items))
        for first in range(0, len(order), batch):
            trainer.update(task, order[first : first + batch])
        return sum(task.tokens(number) for number in order)

    return turn


# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────


def trl_turns(model: Path, folder: Path) -> tuple[Facts, dict[str, Turn]]:
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class Prepared(DPOTrainer):
        """Pairs that are token ids already."""

        def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
            return dataset

    tokenizer = AutoTokenizer.from_pretrained(model)
    samples, preferences = supervised_samples(), pairs()
    ids = [sample.ids.tolist() for sample in samples]
    # -100: no target. The first token has none in either framework.
    rows = Dataset.from_list([{"input_ids": tokens, "labels": tokens} for tokens in ids])
    paired = Dataset.from_list([_columns(pair) for pair in preferences])

    def made(kind: Any, config: Any, data: Any, rows_per_update: int, **settings: Any) -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        arguments = config(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=rows_per_update // MICRO_BATCH, num_train_epochs=1, learning_rate=1e-5, weight_decay=0.0,
            lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=SEED, **({"max_length": MAX_LENGTH} | settings),
        )  # fmt: skip
        trainer = kind(model=loaded, args=arguments, train_dataset=data, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        return trainer

    padded = made(SFTTrainer, SFTConfig, rows, ROWS["sft"])
    packed = made(SFTTrainer, SFTConfig, rows, ROWS["packed"], packing=True, packing_strategy="bfd")
    free = made(SFTTrainer, SFTConfig, rows, ROWS["sft"], padding_free=True, max_length=None)
    dpo = made(Prepared, DPOConfig, paired, ROWS["dpo"], precompute_ref_log_probs=True)
    tokens, pair_tokens = sum(map(len, ids)), sum(pair.tokens for pair in preferences)

    def trained(trainer: Any, count: int) -> Turn:
        def turn() -> int:
            trainer.train()
            return count

        return turn

    def reference_pass() -> int:
        for batch in DataLoader(paired, batch_size=MICRO_BATCH, collate_fn=dpo.data_collator):
            dpo.compute_ref_log_probs(dpo.model, batch)
        return pair_tokens

    facts = {"packed_difference": contamination(packed), "padding_free_difference": contamination(free)}
    return facts, {
        "padded": trained(padded, tokens),
        "packed": trained(packed, tokens),
        "padding_free": trained(free, tokens),
        "dpo": trained(dpo, pair_tokens),
        "dpo_reference": reference_pass,
    }


@torch.no_grad()
def contamination(trainer: Any) -> float:
    """The largest difference, in nats, of a token's log-probability in the trainer's first packed batch and in its sample alone."""
    batch = trainer.data_collator([trainer.train_dataset[place] for place in range(2)])
    together = trainer.model(**batch, use_cache=False, fused_lm_head=True).log_probs[0]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    largest = 0.0
    for start, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
        ids = batch["input_ids"][:, start:end]
        alone = trainer.model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).log_probs[0]
        if len(alone):
            largest = max(largest, float((together[start : end - 1] - alone).abs().max()))
    return largest


def _columns(pair: Pair) -> dict[str, list[int]]:
    start = pair.chosen.prompt_length
    return {"prompt_ids": pair.chosen.ids[:start].tolist(), "chosen_ids": pair.chosen.ids[start:].tolist(),
            "rejected_ids": pair.rejected.ids[start:].tolist()}  # fmt: skip
