"""What can only be known on a GPU, in one script that needs torch, transformers and peft alone.

    python tests/gpu/checks.py [--device cuda|cpu] [--json FILE]

Each check compares what the trainer computes with on this device against float32, against the same without a trick, or against what
is allowed to change; the numbers are printed and written as JSON. Exit status 1: one is beyond its bound. On a CPU everything runs at a
small size, but for what needs CUDA. On a GPU it takes less than five minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from conveyor.data.packing import lay_out
from conveyor.models.attention import PACKED
from conveyor.models.language_model import TokenHead, response_logprobs, target_logprobs
from conveyor.models.liger import apply_liger


@dataclass(frozen=True)
class Size:
    """Of the models and batches; `head`: [tokens, hidden, vocabulary] of the output layer alone."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    longest: int
    samples: int
    head: tuple[int, int, int]


SIZES = {
    "cpu": Size(layers=2, hidden=64, heads=2, vocab=264, longest=48, samples=6, head=(64, 64, 512)),
    "cuda": Size(layers=6, hidden=1024, heads=16, vocab=32_000, longest=1024, samples=16, head=(8192, 4096, 128_256)),
}


@dataclass(frozen=True)
class Row:
    """One measured number. `bound`: the most it may be; None: it is only told."""

    check: str
    what: str
    value: float
    bound: float | None = None

    @property
    def passed(self) -> bool:
        return self.bound is None or self.value <= self.bound


class Skip(Exception):
    """A check that cannot run here, and why."""


def make_model(size: Size, **changes: Any) -> LlamaForCausalLM:
    """Random weights, float32, on CPU; spread widely enough that logits are as large as a trained model's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=3 * size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 4), max_position_embeddings=2 * size.longest,
        tie_word_embeddings=False, attn_implementation="sdpa", **changes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    nn.init.normal_(model.lm_head.weight, std=0.1)
    model.set_output_embeddings(TokenHead.over(model.lm_head, config))
    model.set_attn_implementation(PACKED)
    return model


def on(device: str, model: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A copy there; rotary frequencies stay float32, as DeepSpeed leaves them."""
    moved = copy.deepcopy(model).to(device)
    for parameter in moved.parameters():
        parameter.data = parameter.data.to(dtype)
    return moved


def make_batch(size: Size, packed: bool) -> tuple[Any, Tensor, Tensor]:
    """Tokens, prompt lengths [B], response mask [B, S]; lengths are lognormal."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(size.samples).log_normal_(0, 0.7, generator=generator)
    lengths = (lengths / lengths.max() * size.longest).int().clamp(min=4)
    rows = [torch.randint(5, size.vocab, (int(length),), generator=generator) for length in lengths]
    prompts = (lengths // 3).long()
    responses = lengths - prompts
    return lay_out(rows, packed), prompts, torch.arange(int(responses.max())) < responses[:, None]


def logprobs_and_gradient(model: LlamaForCausalLM, batch: tuple[Any, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens [N] and the gradient of their mean as one vector; float32, on CPU."""
    tokens, prompts, mask = (part.to(model.device) for part in batch)
    logprobs = response_logprobs(model, tokens, prompts, mask, 1.0)[0][mask]
    (-logprobs.mean()).backward()
    gradient = torch.cat([parameter.grad.float().flatten().cpu() for parameter in model.parameters()])
    model.zero_grad(set_to_none=True)
    return logprobs.detach().float().cpu(), gradient


def relative(found: Tensor, want: Tensor) -> float:
    return ((found - want).norm() / want.norm()).item()


def seconds(device: str, function: Callable[[], Any], times: int = 3) -> float:
    """Of the quickest call but the first."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


# ── the checks ───────────────────────────────────────────────────────────────────────────────────────


def bfloat16_step(device: str, size: Size) -> Iterator[Row]:
    """A training step on the device, in float32 and in bfloat16 with float32 master weights, against float32 on a CPU."""
    model, batch = make_model(size), make_batch(size, packed=True)
    want, gradient = logprobs_and_gradient(model, batch)
    for dtype, of_logprobs, of_gradient in ((torch.float32, 1e-3, 1e-3), (torch.bfloat16, 0.1, 0.1)):
        name = str(dtype).removeprefix("torch.")
        got, found = logprobs_and_gradient(on(device, model, dtype), batch)
        yield Row("training step", f"{name}: mean error of log-probs", (got - want).abs().mean().item(), of_logprobs)
        yield Row("training step", f"{name}: error of the gradient, relative", relative(found, gradient), of_gradient)
        stepped = [after_a_step(model, vector) for vector in (found, gradient)]
        moved = stepped[1] - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        share = ((stepped[0] - stepped[1]).norm() / moved.norm()).item()
        yield Row("training step", f"{name}: error of the step, relative", share, 1e-2 if dtype == torch.float32 else 0.5)


def after_a_step(model: LlamaForCausalLM, gradient: Tensor) -> Tensor:
    """Float32 weights, as one vector, after AdamW has taken one step with this gradient (from whose size Adam's first step hardly depends:
    what counts are signs, and ε stands for entries that are only noise)."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).requires_grad_()
    weights.grad = gradient
    torch.optim.AdamW([weights], lr=1e-3, eps=float(gradient.abs().mean())).step()
    return weights.detach()


def packed_attention(device: str, size: Size) -> Iterator[Row]:
    """Samples in one row (on a GPU in bfloat16: one variable-length kernel) against each in a row of its own."""
    model = make_model(size)
    exact, _ = logprobs_and_gradient(on(device, model), make_batch(size, packed=False))
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        there, name = on(device, model, dtype), str(dtype).removeprefix("torch.")
        (packed, of_packed), (padded, of_padded) = (logprobs_and_gradient(there, make_batch(size, packed)) for packed in (True, False))
        yield Row("packed attention", f"{name}: mean difference of log-probs", (packed - padded).abs().mean().item(), bound)
        yield Row("packed attention", f"{name}: difference of the gradient, relative", relative(of_packed, of_padded), 2 * bound)
        errors = [(found - exact).abs().mean().item() for found in (packed, padded)]
        yield Row("packed attention", f"{name}: error, over the padded one's", errors[0] / max(errors[1], 1e-6), 2.0)
    taken = [seconds(device, lambda p=p: logprobs_and_gradient(there, make_batch(size, p))) for p in (True, False)]
    yield Row("packed attention", "time, over the padded one's", taken[0] / taken[1])


def chunked_head(device: str, size: Size) -> Iterator[Row]:
    """Log-probs a chunk of tokens at a time against those of all logits: the same numbers, less memory."""
    tokens, hidden, vocab = size.head
    torch.manual_seed(0)
    head = TokenHead(hidden, vocab, bias=False, device=device)
    states, ids = torch.randn(tokens, hidden, device=device), torch.randint(0, vocab, (tokens,), device=device)

    def whole() -> Tensor:
        return torch.log_softmax(head(states), -1).gather(-1, ids[:, None])[:, 0]

    def chunked() -> Tensor:
        return head(states, ids, chunk=max(1, tokens // 16), entropy=False)[0]

    def step(function: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            head.zero_grad(set_to_none=True)
            function().sum().backward()

        return run

    with torch.no_grad():
        yield Row("chunked head", "largest difference of log-probs", (whole() - chunked()).abs().max().item(), 2e-5)
    step(whole)()
    want = head.weight.grad.clone()
    step(chunked)()
    yield Row("chunked head", "difference of the gradient, relative", relative(head.weight.grad, want), 1e-5)
    del want
    taken = [seconds(device, step(function)) for function in (chunked, whole)]
    yield Row("chunked head", "time, over that of all logits", taken[0] / taken[1])
    if device == "cuda":
        peaks = [peak_bytes(step(function)) for function in (chunked, whole)]
        yield Row("chunked head", "memory, over that of all logits", peaks[0] / peaks[1], 0.5)
        yield Row("chunked head", "memory of all logits, GiB", peaks[1] / 2**30)


def peak_bytes(function: Callable[[], Any]) -> int:
    """That a call allocates on the GPU beside what is there, at most."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def float32_head(device: str, size: Size) -> Iterator[Row]:
    """`model.fp32_head`: log-probs of bfloat16 states and weights against float64."""
    tokens, hidden, vocab = size.head
    tokens = min(tokens, 512)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device).bfloat16()
    head = TokenHead(hidden, vocab, bias=False, device=device).bfloat16()
    head.weight.data.mul_(8)
    ids = torch.randint(0, vocab, (tokens,), device=device)
    errors, taken = [], []
    exact = torch.log_softmax(states.double() @ head.weight.double().T, -1).gather(-1, ids[:, None])[:, 0]
    for head.float32 in (False, True):
        errors.append((head(states, ids)[0].double() - exact).abs().mean().item())
        taken.append(seconds(device, lambda: head(states, ids)[0].sum().backward()))
    yield Row("float32 head", "mean error of log-probs without", errors[0])
    yield Row("float32 head", "mean error with, over that without", errors[1] / errors[0], 0.02)
    yield Row("float32 head", "time with, over that without", taken[1] / taken[0])


def nf4_adapter(device: str, size: Size) -> Iterator[Row]:
    """LoRA on a base in 4 bits: some steps learn a batch, and the base keeps its bits."""
    if find_spec("bitsandbytes") is None:
        raise Skip("bitsandbytes is not installed")
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        make_model(size).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map={"": device}, dtype=torch.bfloat16)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]), model)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens, _, _ = make_batch(size, packed=False)
    tokens = tokens.to(torch.device(device))
    places = torch.cat([torch.arange(1, int(n)) + int(s) for s, n in zip(tokens.starts, tokens.lengths, strict=True)]).to(device)
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for _ in range(6):
        loss = -target_logprobs(model, tokens, places).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    changed = sum(not torch.equal(parameter, base[name]) for name, parameter in model.named_parameters() if name in base)
    yield Row("nf4 adapter", "loss after 5 steps, over that before", losses[-1] / losses[0], 0.999)
    yield Row("nf4 adapter", "weights of the base that changed", changed, 0)
    yield Row("nf4 adapter", "layers in 4 bits are missing", float(not any(w.dtype == torch.uint8 for w in base.values())), 0)


def liger_kernels(device: str, size: Size) -> Iterator[Row]:
    """Liger's kernels against the model's own layers."""
    if device != "cuda" or find_spec("liger_kernel") is None:
        raise Skip("needs a GPU and liger-kernel")
    model, batch = on(device, make_model(size), torch.bfloat16), make_batch(size, packed=True)
    want, gradient = logprobs_and_gradient(model, batch)
    plain = seconds(device, lambda: logprobs_and_gradient(model, batch))
    apply_liger(model, True)
    got, found = logprobs_and_gradient(model, batch)
    yield Row("Liger", "mean difference of log-probs", (got - want).abs().mean().item(), 0.05)
    yield Row("Liger", "difference of the gradient, relative", relative(found, gradient), 0.1)
    yield Row("Liger", "time, over that without", seconds(device, lambda: logprobs_and_gradient(model, batch)) / plain)


CHECKS = (bfloat16_step, packed_attention, chunked_head, float32_head, nf4_adapter, liger_kernels)


def run(device: str) -> dict[str, Any]:
    """Every check; what was measured, as it is written to JSON."""
    began, rows, skipped = time.perf_counter(), [], {}
    for check in CHECKS:
        try:
            for row in check(device, SIZES[device]):
                rows.append(row)
                bound = "" if row.bound is None else f"≤ {row.bound:g}"
                print(f"{'ok  ' if row.passed else 'FAIL'} {row.check:18}{row.what:48}{row.value:12.3g}  {bound}", flush=True)
        except Skip as reason:
            skipped[check.__name__] = str(reason)
            print(f"skip {check.__name__}: {reason}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": time.perf_counter() - began,
        "passed": all(row.passed for row in rows),
        "rows": [asdict(row) | {"passed": row.passed} for row in rows],
        "skipped": skipped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file that the numbers are written to")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    found = run(arguments.device)
    print(f"{found['device']}, torch {found['torch']}: {'passed' if found['passed'] else 'FAILED'} in {found['seconds']:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
