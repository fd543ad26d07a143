"""The engine against transformers: what it samples, with which weights, and who gets it."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.config import sections
from conveyor.types import Prompt, Rollout, SampleId
from conveyor.workers.reports import EvaluationAborted, Publication, SampleDone
from conveyor.workers.rollout import sample_seed
from conveyor.workers.weight_sync import Bucket, publish
from tests.conftest import ENGINE_ROLLOUT
from tests.models.ranks import one_rank

EOS = 2
TIMEOUT = 120


def prompt(index: int, length: int = 12) -> Prompt:
    ids = torch.randint(5, 260, (length - 1,), generator=torch.Generator().manual_seed(index)).tolist()
    return Prompt(index, index, (1, *ids), "")


def changed(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with clearly different weights in every tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return model


def transformers_logprobs(model: torch.nn.Module, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """float32 [R]"""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.response_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, rollout.response_ids[:, None])[:, 0]


def same(a: Rollout, b: Rollout) -> bool:
    return a.id == b.id and torch.equal(a.response_ids, b.response_ids) and torch.equal(a.logprobs, b.logprobs)


def test_seeds_differ_and_stay() -> None:
    seeds = {sample_seed(s, g, k) for s in range(4) for g in range(40) for k in range(8)}
    assert len(seeds) == 4 * 40 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 23) != sample_seed(0, 12, 3)
    assert sample_seed(0, 0, 0) == sample_seed(0, 0, 0, turn=0)
    assert len({sample_seed(0, g, k, turn) for g in range(12) for k in range(12) for turn in range(12)}) == 12**3


@pytest.fixture
def model(tiny_policy: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()


@pytest.fixture
def streams(engine: Any, second_engine: Any) -> tuple["Leaving", "Leaving"]:
    """One reader each: a stream is one queue."""
    call(engine.renew.remote())
    call(second_engine.renew.remote())
    return Leaving(engine), Leaving(second_engine)


def call(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=TIMEOUT)


class Leaving:
    """What leaves an engine, one sample after the other."""

    def __init__(self, engine: Any) -> None:
        self._stream = engine.stream.remote()
        self._waiting: deque[tuple[SampleDone | EvaluationAborted, Rollout | None]] = deque()

    def next(self) -> tuple[SampleDone | EvaluationAborted, Rollout | None]:
        while not self._waiting:
            reports, rollouts = call(next(self._stream)), iter(call(next(self._stream)))
            self._waiting += [(report, next(rollouts) if isinstance(report, SampleDone) else None) for report in reports]
            assert next(rollouts, None) is None
        return self._waiting.popleft()


def next_sample(leaving: Leaving) -> tuple[SampleDone, Rollout]:
    done, rollout = leaving.next()
    assert isinstance(done, SampleDone)
    assert isinstance(rollout, Rollout)
    return done, rollout


def published(model: torch.nn.Module, version: int) -> Publication:
    publication = publish(model.named_parameters(), version, "actor", verify=True)
    assert publication is not None
    return publication


@pytest.mark.slow
def test_a_sample_is_the_same_alone_and_in_a_batch(engine: Any) -> None:
    prompts = [prompt(i, 5 + 3 * i) for i in range(12)]
    together = call(engine.generate.remote(prompts, 2))
    assert [rollout.id.group for rollout in together] == [i for i in range(12) for _ in range(2)]
    alone = call(engine.generate.remote([prompts[5]], 2))
    assert all(map(same, alone, together[10:12]))
    assert not torch.equal(alone[0].response_ids, alone[1].response_ids)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(engine: Any, model: torch.nn.Module, temperature: float) -> None:
    for rollout in call(engine.generate.remote([prompt(i, 4 + 9 * i) for i in range(4)], 2, temperature=temperature)):
        right = transformers_logprobs(model, rollout, temperature)
        torch.testing.assert_close(rollout.logprobs, right, atol=1e-5, rtol=0)
        assert rollout.logprobs.dtype == torch.float32
        assert rollout.versions.tolist() == [0] * len(right)


@pytest.mark.slow
def test_greedy_takes_the_most_likely_token(engine: Any, model: torch.nn.Module) -> None:
    (rollout,) = call(engine.generate.remote([prompt(3)], 1, greedy=True))
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.response_ids.tolist()]])
    with torch.no_grad():
        best = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].argmax(-1)
    assert rollout.response_ids.tolist() == best.tolist()


@pytest.mark.slow
def test_eos_is_kept_and_never_invented(engine: Any) -> None:
    """Case 7."""
    rollouts = call(engine.generate.remote([prompt(i) for i in range(32)], 2))
    stopped = [rollout for rollout in rollouts if not rollout.truncated]
    truncated = [rollout for rollout in rollouts if rollout.truncated]
    assert len(stopped) > 4
    assert len(truncated) > 4
    for rollout in stopped:
        assert rollout.response_ids.tolist().index(EOS) == len(rollout.response_ids) - 1
        assert "</s>" not in rollout.text
    for rollout in truncated:
        assert EOS not in rollout.response_ids.tolist()
        assert len(rollout.response_ids) == ENGINE_ROLLOUT.max_response_length


@pytest.mark.slow
def test_samples_return_to_their_own_prompts(streams: tuple["Leaving", "Leaving"], engine: Any, second_engine: Any) -> None:
    """Case 22: two engines share five prompts; what arrives equals what each engine makes of its own, one at a time."""
    prompts = [prompt(i, 6 + 5 * i) for i in range(5)]
    for i, each in enumerate(prompts):
        call((engine, second_engine)[i % 2].submit.remote(each, 3))
    arrived = [next_sample(streams[0]) for _ in range(9)] + [next_sample(streams[1]) for _ in range(6)]
    alone = [call((engine, second_engine)[i % 2].generate.remote([each], 3)) for i, each in enumerate(prompts)]
    right = {rollout.id: rollout for rollouts in alone for rollout in rollouts}
    assert {done.id for done, _ in arrived} == set(right)
    for done, rollout in arrived:
        assert same(rollout, right[done.id])
        assert rollout.prompt == prompts[done.id.group]
        assert (done.tokens, done.truncated) == (len(rollout.response_ids), rollout.truncated)
        assert done.span.start < done.span.end


@pytest.mark.slow
def test_new_weights_and_no_stale_prefix(engine: Any, model: torch.nn.Module, restored: None) -> None:
    """Cases 14 and 15: the second time, the prompt's KV blocks are cached, of the old weights."""
    long = prompt(50, 350)
    before = call(engine.generate.remote([long], 2))
    report = call(engine.install.remote(published(changed(model, 1), 4)))
    assert (report.version, report.mismatched) == (4, ())
    after = call(engine.generate.remote([long], 2))
    assert not torch.equal(before[0].response_ids, after[0].response_ids)
    for rollout in after:
        torch.testing.assert_close(rollout.logprobs, transformers_logprobs(model, rollout), atol=1e-5, rtol=0)
        assert set(rollout.versions.tolist()) == {4}


@pytest.mark.slow
def test_a_tied_output_layer_follows_the_embedding(second_engine: Any, tied_policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_policy, dtype=torch.float32).eval()
    for version in (1, 2):
        assert call(second_engine.install.remote(published(changed(model, version), version))).mismatched == ()
        for rollout in call(second_engine.generate.remote([prompt(version)], 2)):
            torch.testing.assert_close(rollout.logprobs, transformers_logprobs(model, rollout), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_one_changed_weight_and_a_corrupted_bucket(engine: Any, model: torch.nn.Module, restored: None) -> None:
    """Case 15."""
    import ray

    name = "model.layers.1.self_attn.k_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3] += 0.5
    publication = published(model, 1)
    assert call(engine.install.remote(publication)).mismatched == ()
    (rollout,) = call(engine.generate.remote([prompt(8)], 1))
    torch.testing.assert_close(rollout.logprobs, transformers_logprobs(model, rollout), atol=1e-5, rtol=0)

    bucket = call(publication.buckets[0])
    place = next(place for place in bucket.places if place.name == name)
    data = bucket.data.copy()
    data[place.offset] ^= 1
    corrupted = replace(publication, buckets=(ray.put(Bucket(bucket.places, data)), *publication.buckets[1:]))
    assert call(engine.install.remote(corrupted)).mismatched == (name,)


@pytest.mark.slow
def test_every_zero_stage_publishes_what_it_trains(engine: Any, tiny_policy: Path, restored: None) -> None:
    """Case 15: after an optimizer step of each stage the engine's log-probs are the trainer's."""
    from conveyor.models.train_engine import TrainEngine

    one_rank()
    for stage in (0, 1, 2, 3):
        module = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
        train = sections.Train(zero_stage=stage)  # type: ignore[arg-type]
        trained = TrainEngine(module, train, learning_rate=3e-2, total_updates=1, dtype="float32", accelerator="cpu")
        ids = torch.tensor([prompt(stage, 20).token_ids])
        trained.backward(trained.forward(lambda model, ids: -model(ids).logits.log_softmax(-1)[..., 7].sum(), ids), last=True)
        assert not trained.step(20).skipped
        publication = publish(trained.named_weights(), stage, "actor", verify=True)
        assert publication is not None
        assert call(engine.install.remote(publication)).mismatched == ()
        fresh = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
        before = [weight.clone() for weight in fresh.parameters()]
        fresh.load_state_dict({name: weight.clone() for name, weight in trained.named_weights()})
        assert all(not torch.equal(old, new) for old, new in zip(before, fresh.parameters(), strict=True))
        for rollout in call(engine.generate.remote([prompt(stage)], 2)):
            torch.testing.assert_close(rollout.logprobs, transformers_logprobs(fresh, rollout), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_install_in_flight_keeps_requests(
    streams: tuple["Leaving", "Leaving"], engine: Any, model: torch.nn.Module, tiny_policy: Path, restored: None
) -> None:
    """Every token comes from the weights of its version alone, also within one response. After an install all requests are
    prefilled anew, which is more than an engine does in one step."""
    models = {0: AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()}
    prompts = [prompt(i, 200) for i in range(100, 116)]
    for each in prompts:
        call(engine.submit.remote(each, 4))
    arrived: list[Rollout] = []
    for version in range(1, 5):
        arrived += [next_sample(streams[0])[1] for _ in range(8)]
        models[version] = changed(AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval(), version)
        call(engine.install.remote(published(models[version], version)))
    arrived += [next_sample(streams[0])[1] for _ in range(64 - len(arrived))]
    assert len({rollout.id for rollout in arrived}) == 64
    assert any(len(rollout.versions.unique()) > 1 for rollout in arrived)
    for rollout in arrived:
        assert (rollout.versions.diff() >= 0).all()
        right = torch.stack([transformers_logprobs(models[v], rollout) for v in range(5)])
        own = right.gather(0, rollout.versions[None].long())[0]
        torch.testing.assert_close(rollout.logprobs, own, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_evaluation_is_of_one_version_and_gives_way_to_an_install(
    streams: tuple["Leaving", "Leaving"], engine: Any, model: torch.nn.Module, restored: None
) -> None:
    call(engine.evaluate.remote(prompt(-1, 20), 2, 0, 0.0))
    greedy = [next_sample(streams[0])[1] for _ in range(2)]
    assert torch.equal(greedy[0].response_ids, greedy[1].response_ids) and {rollout.id.group for rollout in greedy} == {-1}
    for i in range(2, 6):
        call(engine.evaluate.remote(prompt(-i, 20), 4, 0))
    call(engine.submit.remote(prompt(1, 20), 2))
    call(engine.install.remote(published(changed(model, 1), 1)))
    call(engine.evaluate.remote(prompt(-6, 20), 1, 0))  # too late: the engine holds version 1
    aborted, kept = set[SampleId](), set[SampleId]()
    while len(aborted) + len(kept) < 19:
        item, rollout = streams[0].next()
        if isinstance(item, EvaluationAborted):
            assert item.version == 0
            aborted.add(item.id)
            continue
        kept.add(item.id)
        assert rollout is not None
        assert item.id.group >= 0 or set(rollout.versions.tolist()) == {0}
    assert SampleId(-6, 0) in aborted and len(aborted) > 5
    assert {SampleId(1, 0), SampleId(1, 1)} <= kept, "the training's requests live on"


@pytest.mark.slow
def test_renewal_drops_what_an_earlier_run_left(second_engine: Any) -> None:
    call(second_engine.renew.remote())
    earlier = second_engine.stream.remote()
    for i in range(8):
        call(second_engine.submit.remote(prompt(i), 2))
    call(second_engine.renew.remote())
    stream = Leaving(second_engine)
    call(second_engine.submit.remote(prompt(90), 2))
    assert {next_sample(stream)[0].id for _ in range(2)} == {SampleId(90, 0), SampleId(90, 1)}
    assert len(list(earlier)) % 2 == 0  # it ends, with reports and their rollouts


@pytest.mark.slow
def test_a_failing_engine_is_heard_everywhere(second_engine: Any) -> None:
    from conveyor.workers.rollout import RolloutError

    wrong = publish([("model.norm.weight", torch.zeros(3))], 1, "actor", verify=False)
    stream = second_engine.stream.remote()
    for _ in range(2):
        with pytest.raises(RolloutError, match="the rollout engine failed"):
            call(second_engine.install.remote(wrong))
    with pytest.raises(RolloutError):
        call(second_engine.submit.remote(prompt(0), 1))
    with pytest.raises(RolloutError):
        call(second_engine.generate.remote([prompt(0)], 1))
    with pytest.raises(RolloutError):
        call(next(stream))
    call(second_engine.close.remote())
