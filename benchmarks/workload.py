"""What the benchmarks on real models train: a small untrained Llama, prompts of random letters, a reward that costs nothing.

Untrained, because only the amount of work counts; a trained model of this size would be no slower and no faster.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from benchmarks.forced_lengths import CAP
from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.quickstart.base_model import train_tokenizer

HERE = Path(__file__).parent
PROMPTS = 1024
PROMPT_LETTERS = 48
MAX_PROMPT = 64
"""Tokens."""
SAMPLES = 64
"""Of a step: 64 prompts for PPO, 8 prompts with 8 samples each for GRPO."""
GROUP_SIZE = {"ppo": 1, "grpo": 8}
MICRO_BATCH = 8
CONCURRENT = 32
"""Samples in the engine at a time: half a step, so that a step comes in waves."""
LEARNING_RATE = 1e-5
SEED = 3
POLICY: dict[str, Any] = dict(hidden_size=192, intermediate_size=768, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=6)
"""1.9M parameters, so that training a step takes a core about as long as sampling it."""
CRITIC: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=384, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3, num_labels=1
)
"""Small, so that this holds for PPO too."""


def make(folder: Path) -> Path:
    """Write policy, critic and prompts; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    texts = ["".join(rng.choices(string.ascii_lowercase, k=PROMPT_LETTERS)) for _ in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = train_tokenizer([" ".join(string.ascii_lowercase)])
    common: dict[str, Any] = dict(
        vocab_size=len(tokenizer), max_position_embeddings=MAX_PROMPT + CAP, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(SEED)
    models: dict[str, PreTrainedModel] = {
        "policy": LlamaForCausalLM(LlamaConfig(**POLICY, **common)),
        "critic": LlamaForSequenceClassification(LlamaConfig(**CRITIC, **common)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def recipe(inputs: Path, output: Path, method: str, steps: int, **pipeline: Any) -> OnlineRecipe:
    """A recipe with the engine on one core, everything else on another."""
    raw: dict[str, Any] = {
        "method": method,
        "output_dir": str(output),
        "overwrite": True,
        "seed": SEED,
        "model": {"path": str(inputs / "policy")},
        "data": {"path": str(inputs / "prompts.jsonl"), "max_prompt_length": MAX_PROMPT, "shuffle": False},
        "rewards": [{"name": "letters", "function": f"{HERE / 'reward.py'}:letters"}],
        "rollout": {
            "n_samples_per_prompt": GROUP_SIZE[method],
            "max_response_length": CAP,
            "max_concurrent_requests": CONCURRENT,
            "engine_args": {"logits_processors": ["benchmarks.engine_lengths:EngineLengths"]},
        },
        "algorithm": {"kl_coef": 0.0},
        "train": {"rollout_batch_size": SAMPLES // GROUP_SIZE[method], "steps": steps, "learning_rate": LEARNING_RATE},
        "pipeline": {"micro_batch_size": MICRO_BATCH, **pipeline},
        "devices": {"rollout": 1, "train": 1},
        "roles": {"score": "train"},
    }
    if method == "ppo":
        raw["critic"] = {"path": str(inputs / "critic")}
    made = parse_recipe(raw)
    assert isinstance(made, OnlineRecipe)
    return made
