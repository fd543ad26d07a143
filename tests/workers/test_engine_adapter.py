"""Adapters in a vLLM engine: each version's takes the place of the last, the base never changes, and the samples are the policy's."""

from __future__ import annotations

import copy
import multiprocessing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conveyor.config import sections
from conveyor.models.adapter_files import write_adapter
from conveyor.models.adapters import add_adapter, is_trained
from conveyor.models.language_model import load_language_model
from conveyor.models.quantized import values
from conveyor.workers.engine_adapter import engine_arguments
from conveyor.workers.weight_sync import checksum, publish
from tests.tiny import save_tiny_policy

INSTALLS = 100
PROMPT = [1, 40, 50, 60]


def test_engines_have_room_for_the_rank_and_dora_is_not_theirs() -> None:
    model = sections.Model(path="unused")
    assert engine_arguments(sections.Lora(rank=9), model, {}) == {
        "enable_lora": True, "max_lora_rank": 16, "max_loras": 1, "max_cpu_loras": 1,
    }  # fmt: skip
    assert engine_arguments(sections.Lora(rank=9, use_dora=True), model, {}) == {}
    assert engine_arguments(sections.Lora(sync="merged", quantization="nf4"), model, {}) == {}
    quantized = sections.Lora(quantization="nf4")
    assert engine_arguments(quantized, model, {})["model_loader_extra_config"] == {"dtype": "float32"}
    assert "load_format" not in engine_arguments(quantized, model, {"quantization": "bitsandbytes"})


def base_checksums(worker: Any) -> dict[str, str]:
    """Called in vLLM's worker: of all weights but the adapter's."""
    return {name: checksum(parameter) for name, parameter in worker.get_model().named_parameters()}


class Trained:
    """What a trainer has: the model with an adapter, drawn anew for each version."""

    def __init__(self, path: Path, lora: sections.Lora) -> None:
        self.lora, self.path = lora, path
        self.model = load_language_model(sections.Model(path=str(path)), lora)
        add_adapter(self.model, lora)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def publish(self, version: int) -> Any:
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if is_trained(name)]
        for _, parameter in trained:
            parameter.normal_(0, 0.2, generator=self.generator)
        return publish(trained, version, "actor", verify=True, put=copy.deepcopy)

    @torch.no_grad()
    def difference(self, token_ids: list[int], logprobs: torch.Tensor) -> torch.Tensor:
        """[R]: of log-probs, engine and trainer."""
        ids = torch.tensor([[*PROMPT, *token_ids]])
        wanted = self.model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return (wanted - logprobs).abs()


def engine_process(path: Path, lora: sections.Lora, results: Path) -> None:
    """A process of its own, as vLLM takes the process group of the one it is in."""
    from conveyor.workers.vllm_engine import set_environment, start_engine

    settings = sections.Rollout(max_response_length=12, max_concurrent_requests=8)
    set_environment(settings, (0,))
    from vllm.lora.request import LoRARequest

    from conveyor.workers.engine_adapter import EngineAdapter
    from conveyor.workers.engine_requests import EngineRequests

    engine, _ = start_engine(sections.Model(path=str(path)), settings, 128, lora)
    adapter, trained = EngineAdapter(engine, lora, str(path)), Trained(path, lora)
    requests = EngineRequests(engine, settings, adapter)
    samples: list[Any] = []

    def sample(seed: int) -> None:
        requests.add(PROMPT, samples.append, seed=seed)
        while requests:
            requests.step()

    found: dict[str, Any] = {"differences": [], "mismatched": []}
    sample(0)
    found["differences"].append(trained.difference(samples[-1].token_ids, samples[-1].logprobs))
    (before,) = engine.collective_rpc(base_checksums)
    with patch("ray.get", lambda bucket: bucket):
        for version in range(1, INSTALLS + 1):
            found["mismatched"] += requests.install(trained.publish(version))
            if version % 20 == 0:
                sample(version)
                found["differences"].append(trained.difference(samples[-1].token_ids, samples[-1].logprobs))
        found["same base"] = before == engine.collective_rpc(base_checksums)[0] and len(before) > 10
        requests.add(PROMPT, samples.append, seed=3)
        for _ in range(4):
            requests.step()
        requests.install(trained.publish(INSTALLS + 1))
    while requests:
        requests.step()
    found["in flight"] = samples[-1].versions, trained.difference(samples[-1].token_ids, samples[-1].logprobs)
    write_adapter(lora, [(name, values(p)) for name, p in trained.model.named_parameters()], str(path), results.parent / "adapter")
    adapter.request = LoRARequest("saved", 2, str(results.parent / "adapter"))
    sample(9)
    found["saved"] = trained.difference(samples[-1].token_ids, samples[-1].logprobs)
    torch.save(found, results)
    requests.shutdown()


@pytest.mark.slow
def test_case_15_a_hundred_adapters_and_one_base(tmp_path: Path) -> None:
    """Log-probs are those of (W + s·BA)x after each install, with W in 4 bits; the rest of a running sample is the new version's."""
    path = save_tiny_policy(tmp_path / "policy", initializer_range=0.1)
    lora = sections.Lora(rank=4, alpha=8.0, use_rslora=True, quantization="nf4")
    process = multiprocessing.get_context("spawn").Process(target=engine_process, args=(path, lora, tmp_path / "found.pt"))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    found = torch.load(tmp_path / "found.pt")
    assert len(found["differences"]) == 6 and all(difference.max() < 1e-5 for difference in found["differences"])
    assert found["mismatched"] == [] and found["same base"]
    versions, difference = found["in flight"]
    assert versions.tolist() == [INSTALLS] * 4 + [INSTALLS + 1] * 8
    assert difference[4:].max() < 1e-5 < difference[:4].max()
    assert found["saved"].max() < 1e-5, "what a run saves is served as it is"
