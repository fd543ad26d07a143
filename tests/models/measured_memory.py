"""Run as a program: what loading and log-probs take of a fresh process's memory, in bytes, as JSON."""

import json
import resource
import sys
import threading
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from conveyor.config.sections import Model
from conveyor.data.packing import lay_out
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.scalar_model import load_scalar_model
from tests.tiny import tiny_config

VOCAB = 32_000
RESPONSE = 48


def anonymous() -> int:
    """Memory that is this process's own and no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


class Peak(threading.Thread):
    """The most anonymous memory beyond what there was at its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.most, self.over = anonymous(), 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous() - self.before)
            time.sleep(0.002)

    def end(self) -> int:
        self.over = True
        self.join()
        return max(self.most, anonymous() - self.before)


def loading(folder: str, dtype: str) -> dict[str, float]:
    """Peaks while an actor and then a critic come from the same files, and when both have been written to; as shares of their sizes."""
    peak, found = Peak(), []
    peak.start()
    for load in (load_language_model, lambda model: load_scalar_model(model, new_head=True)):
        found.append(load(Model(path=folder, dtype=dtype)))
    size = sum(p.numel() * p.element_size() for model in found for p in model.parameters())
    at_load = peak.end()
    for model in found:
        for parameter in model.parameters():
            parameter.data.add_(0)  # whatever was only mapped becomes this process's own
    return {"loaded": at_load / size, "written": (anonymous() - peak.before) / size}


def growth(function, prompts: tuple[int, int]) -> int:
    """Bytes by which the process's peak grows from a short prompt to a long one."""
    peaks = []
    for prompt in prompts:
        function(prompt)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks[1] - peaks[0]


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    for name, hidden in (("narrow", 64), ("wide", 256)):
        config = tiny_config(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden, max_position_embeddings=4096)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    load_scalar_model(Model(path=str(folder / "narrow")), new_head=True)  # all that is imported once
    model = load_language_model(Model(path=str(folder / "narrow")))

    def chunked(prompt: int) -> None:
        ids = torch.randint(5, VOCAB, (prompt + RESPONSE,))
        batch = lay_out([ids], True), torch.tensor([prompt]), torch.ones(1, RESPONSE, dtype=torch.bool)
        response_logprobs(model, *batch, 1.0)[0].sum().backward()

    def textbook(prompt: int) -> None:
        ids = torch.randint(5, VOCAB, (1, prompt + RESPONSE))
        logprobs = model(input_ids=ids).logits.log_softmax(-1)[:, prompt - 1 : -1]
        logprobs.gather(-1, ids[:, prompt:, None]).sum().backward()

    # The peak of a process only grows, so what takes less comes first.
    found = {"chunked": growth(chunked, (64, 2048)), "textbook": growth(textbook, (64, 2048))}
    print(json.dumps(found | {dtype: loading(str(folder / "wide"), dtype) for dtype in ("float32", "bfloat16")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
