"""GRPO here against TRL's GRPOTrainer: the same model, prompts, lengths, batch, loss and updates, all cores for both.

TRL samples with transformers' `generate`, as it does without vLLM, in one process with a thread a core. Conveyor is on-policy too: its
engine has one core, its trainer the other. Both sample exactly as many tokens in each step and make one update of it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, PrinterCallback, TrainerCallback

from benchmarks import workload
from benchmarks.forced_lengths import CAP, RowLengths, length_of
from benchmarks.real_runs import real_runs
from benchmarks.results import Result, Say, median
from benchmarks.reward import letters
from conveyor.workers.rollout import sample_seed

STEPS, SKIP = 6, 2
REPETITIONS = 1
GROUP = workload.GROUP_SIZE["grpo"]
PROMPTS = workload.SAMPLES // GROUP


def run(folder: Path, say: Say) -> list[Result]:
    rates: dict[str, list[float]] = {"trl": [], "conveyor": []}
    tokens: dict[str, list[int]] = {}
    with real_runs(folder) as runs:
        for repetition in range(REPETITIONS):
            rate, tokens["trl"] = _trl(runs.inputs, folder / "trl")
            finished = runs.go(workload.recipe(runs.inputs, folder / "against_trl", "grpo", STEPS, order="completion"))
            rates["trl"].append(rate)
            rates["conveyor"].append(finished.tokens_per_second)
            tokens["conveyor"] = finished.tokens
            latest = ", ".join(f"{name} {found[-1]:,.0f} tokens/s" for name, found in rates.items())
            say(f"repetition {repetition + 1}: {latest}")
    medians = {name: median(found) for name, found in rates.items()}
    assert tokens["trl"] == tokens["conveyor"], "both sample the same number of tokens in every step"
    details = {"tokens_per_second": rates, "tokens_per_step": tokens["trl"]}
    return [Result("against_trl", "on-policy GRPO: times TRL's tokens/s", medians["conveyor"] / medians["trl"], 3.0, details=details)]


class _Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())


def _trl(inputs: Path, output: Path) -> tuple[float, list[int]]:
    """(tokens a second without the first steps and the last, tokens of each step)"""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        clock, tokens = _Clock(), list[int]()
        _trainer(inputs, output, clock, tokens).train()
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(output, ignore_errors=True)
    seconds = clock.ends[-2] - clock.ends[SKIP - 1]
    return sum(tokens[SKIP:-1]) / seconds, tokens


def _trainer(inputs: Path, output: Path, clock: _Clock, tokens: list[int]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    warnings.simplefilter("ignore")
    rows = [json.loads(line) for line in (inputs / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: STEPS * PROMPTS]]
    # The chat template that Conveyor puts a text through.
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(inputs / "policy")
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_reward,
        args=GRPOConfig(
            output_dir=str(output), use_cpu=True, bf16=False, per_device_train_batch_size=workload.MICRO_BATCH,
            gradient_accumulation_steps=workload.SAMPLES // workload.MICRO_BATCH, num_generations=GROUP, max_completion_length=CAP,
            max_steps=STEPS, learning_rate=workload.LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95,
            max_grad_norm=1.0, temperature=1.0, beta=0.0, epsilon=0.2, loss_type="dapo",
            gradient_checkpointing=False, shuffle_dataset=False, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, seed=workload.SEED,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    generate = model.generate

    def with_lengths(**arguments: Any) -> Any:
        first = len(tokens) * PROMPTS
        lengths = [length_of(sample_seed(workload.SEED, group, k)) for group in range(first, first + PROMPTS) for k in range(GROUP)]
        tokens.append(sum(lengths))
        return generate(**arguments, logits_processor=LogitsProcessorList([RowLengths(lengths, tokenizer.eos_token_id)]))

    model.generate = with_lengths
    return trainer


def _reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return list(letters(prompts, [completion[0]["content"] for completion in completions]))
