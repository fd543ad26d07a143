"""One engine of two processes and tied output layer: the weights it computes with, however they came, and what it gives back asleep."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.types import Rollout
from conveyor.workers.engine_weights import bucket_file, kv_cache_bytes
from conveyor.workers.rendezvous import free_door
from conveyor.workers.rollout import RolloutError
from conveyor.workers.weight_stream import Sender, announce, layout_of
from conveyor.workers.weight_sync import Bucket, BucketWriter, publish, views
from tests.conftest import rollout_engine
from tests.workers.test_rollout import call, changed, prompt, published, same, transformers_logprobs

PROMPTS = [prompt(i, 6 + 9 * i) for i in range(3)]
GIB = 2**30


@pytest.fixture(scope="module")
def parallel(ray_session: None, tied_policy: Path) -> Iterator[Any]:
    """Two processes, with the model's one key/value head on both; the last test ends it."""
    with rollout_engine(tied_policy, tensor_parallel_size=2, engine_args={"max_logprobs": 7, "seed": 11}) as started:
        yield started


@pytest.fixture
def model(tied_policy: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tied_policy, dtype=torch.float32).eval()


def check(engine: Any, model: torch.nn.Module, version: int) -> list[Rollout]:
    """What the engine samples has the model's log-probs and the version."""
    rollouts: list[Rollout] = call(engine.generate.remote(PROMPTS, 2))
    for rollout in rollouts:
        torch.testing.assert_close(rollout.logprobs, transformers_logprobs(model, rollout), atol=1e-5, rtol=0)
        assert set(rollout.versions.tolist()) == {version}
    return rollouts


def test_a_bucket_lives_on_in_what_was_mapped_from_it() -> None:
    writer = BucketWriter(100)
    writer.add("a", torch.arange(5.0))
    writer.add("b", torch.arange(3, dtype=torch.bfloat16))
    with bucket_file(writer.take()) as file:
        mapped = torch.from_file(file.path, shared=False, size=file.nbytes, dtype=torch.uint8)
    found = dict(views(file.places, mapped))
    assert torch.equal(found["a"], torch.arange(5.0)) and torch.equal(found["b"], torch.arange(3, dtype=torch.bfloat16))
    assert not Path(file.path).exists()


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_compute_with_the_weights_that_were_installed(parallel: Any, model: torch.nn.Module, tied_policy: Path) -> None:
    """Case 15, tensor parallel: before and after two installs, in many small buckets; a damaged tensor is named."""
    import ray

    assert (call(parallel.argument.remote("parallel_config.world_size")), call(parallel.argument.remote("model_config.seed"))) == (2, 11)
    before = check(parallel, model, 0)
    for version in (1, 2):
        changed(model, version)
        publication = publish(model.named_parameters(), version, "actor", verify=True, writer=BucketWriter(30_000))
        assert publication is not None and len(publication.buckets) > 5
        assert call(parallel.install.remote(publication)).mismatched == ()
        after = check(parallel, model, version)
    assert not any(map(same, before, after))

    bucket = call(publication.buckets[2])
    data = bucket.data.copy()
    data[bucket.places[-1].offset] ^= 1
    damaged = replace(publication, buckets=(*publication.buckets[:2], ray.put(Bucket(bucket.places, data)), *publication.buckets[3:]))
    assert call(parallel.install.remote(damaged)).mismatched == (bucket.places[-1].name,)


@pytest.mark.long
@pytest.mark.slow
def test_the_trainer_sends_to_both_processes(parallel: Any, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the trainer's rank."""
    monkeypatch.setattr("conveyor.workers.weight_stream.MEETING", timedelta(seconds=60))
    address, port = free_door()
    sender = Sender("gloo")
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(sender.open, 0, address, port, 3)
        call(parallel.open_stream.remote("gloo", address, port, 3))
        opening.result()
    for version in (3, 4):
        changed(model, version)
        layout = layout_of(model.named_parameters())
        publication = announce(model.named_parameters(), layout, version, "actor", verify=True)
        assert publication.checksums is not None and publication.nbytes == sum(p.nbytes for p in model.parameters())
        if version == 4:
            publication = replace(publication, checksums={**publication.checksums, "model.norm.weight": "another"})
        installing = parallel.install.remote(publication)
        sender.send(model.named_parameters(), layout, [0])
        assert call(installing).mismatched == (("model.norm.weight",) if version == 4 else ())
        check(parallel, model, version)


@pytest.mark.long
@pytest.mark.slow
def test_the_second_sample_of_a_group_finds_its_prompt_in_the_cache(parallel: Any) -> None:
    """Prefix caching is on by default; blocks are of 128 tokens on CPU."""
    long = prompt(70, 300)
    _, first = call(parallel.cached_tokens.remote([long], 1))
    _, second = call(parallel.cached_tokens.remote([long], 1))
    assert (first, second) == ([0], [256])


@pytest.mark.long
@pytest.mark.slow
def test_asleep_it_has_no_cache_and_awake_it_samples_as_before(parallel: Any, model: torch.nn.Module) -> None:
    call(parallel.install.remote(published(changed(model, 5), 5)))
    before = check(parallel, model, 5)
    call(parallel.sleep.remote())
    assert call(parallel.on_workers.remote(kv_cache_bytes)) == [0, 0]
    call(parallel.wake.remote())
    assert call(parallel.on_workers.remote(kv_cache_bytes)) == [GIB, GIB]
    assert all(map(same, before, check(parallel, model, 5)))

    call(parallel.sleep.remote())
    call(parallel.install.remote(published(changed(model, 6), 6)))
    assert call(parallel.on_workers.remote(kv_cache_bytes)) == [0, 0]
    call(parallel.wake.remote())
    asleep = check(parallel, model, 6)
    call(parallel.install.remote(published(model, 6)))
    assert all(map(same, asleep, check(parallel, model, 6))), "as if it had been awake"


@pytest.mark.long
@pytest.mark.slow
def test_a_sleeping_engine_takes_no_samples(parallel: Any) -> None:
    call(parallel.sleep.remote())
    with pytest.raises(RolloutError, match="submitted to a sleeping engine"):
        call(parallel.generate.remote(PROMPTS[:1], 1))
    call(parallel.close.remote())
