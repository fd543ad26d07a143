"""The engine of transformers, driven as a rollout worker does: who joins, leaves or is interrupted when changes nothing for the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from conveyor.config import RunError, UserError, sections
from conveyor.episodes.episode import Sampled
from conveyor.workers.reports import Publication
from conveyor.workers.transformers_engine import TransformersEngine, start_transformers_engine
from conveyor.workers.weight_sync import publish
from tests.tiny import save_tiny_policy, tiny_tokenizer
from tests.workers.test_rollout import EOS, changed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose samples end after about ten tokens, and whose probabilities are far from equal."""
    folder = save_tiny_policy(tmp_path_factory.mktemp("models") / "policy", initializer_range=0.1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.model.norm.weight[0] = 2.0
        model.lm_head.weight[EOS, 0] = 2.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As bits are only the same where products are not shared among threads in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Driven:
    """An engine, and what has come out of it."""

    engine: TransformersEngine
    out: dict[Any, Sampled] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)

    def add(self, key: Any, ids: list[int], **settings: Any) -> None:
        self.names[key] = self.engine.add(ids, lambda sampled: self.out.__setitem__(key, sampled), **settings)

    def finish(self) -> dict[Any, Sampled]:
        while self.engine:
            self.engine.step()
        return self.out


def driven(folder: Path, max_model_len: int | None = None, **rollout: Any) -> Driven:
    settings = sections.Rollout(**{"engine": "transformers", "max_response_length": 24, "max_concurrent_requests": 16, **rollout})
    return Driven(start_transformers_engine(sections.Model(path=str(folder)), settings, max_model_len, CPU)[0])


def prompt(number: int, length: int) -> list[int]:
    return [1, *torch.randint(5, 260, (length - 1,), generator=torch.Generator().manual_seed(number)).tolist()]


REQUESTS: dict[int, tuple[list[int], dict[str, Any]]] = {
    number: (prompt(number // 3, 1 + number // 3 * 17 % 120), {"seed": number, "temperature": (None, 0.7, 0.0)[number // 7 % 3]})
    for number in range(30)
}
"""Ten prompts of 1 to 120 tokens, three samples each, at several temperatures."""


def alone(folder: Path, *keys: int, **rollout: Any) -> dict[int, Sampled]:
    one = driven(folder, **rollout)
    for key in keys:
        ids, settings = REQUESTS[key]
        one.add(key, ids, **settings)
        one.finish()
    return one.out


@pytest.fixture(scope="module")
def each_alone(policy: Path, _one_thread: None) -> dict[int, Sampled]:
    return alone(policy, *REQUESTS)


def same(a: Sampled, b: Sampled) -> bool:
    """The same tokens, with the same bits where they are known to be."""
    tolerance = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 1e-6
    return a.token_ids == b.token_ids and a.finish_reason == b.finish_reason and bool((a.logprobs - b.logprobs).abs().max() <= tolerance)


def right_logprobs(model: torch.nn.Module, ids: list[int], sampled: Sampled, temperature: float = 1.0) -> torch.Tensor:
    """float32 [K], by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *sampled.token_ids]])).logits[0, len(ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]


def loaded(folder: Path, seed: int | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model if seed is None else changed(model, seed)


def install(one: Driven, model: torch.nn.Module, version: int, damage: str | None = None) -> tuple[str, ...]:
    publication = publish(model.named_parameters(), version, "actor", verify=True, put=lambda bucket: bucket)
    assert isinstance(publication, Publication)
    if damage is not None:
        bucket = publication.buckets[0]
        place = next(place for place in bucket.places if place.name == damage)
        bucket.data[place.offset] ^= 1
    with patch("ray.get", lambda bucket: bucket):
        return one.engine.install(publication)


def test_logprobs_are_those_of_a_plain_forward_pass(policy: Path) -> None:
    one, model = driven(policy), loaded(policy)
    for key, (ids, settings) in REQUESTS.items():
        one.add(key, ids, **settings)
    for key, sampled in one.finish().items():
        ids, settings = REQUESTS[key]
        right = right_logprobs(model, ids, sampled, settings["temperature"] or 1.0)
        torch.testing.assert_close(sampled.logprobs, right, atol=1e-5, rtol=0)
        assert sampled.logprobs.dtype == torch.float32 and sampled.versions.tolist() == [0] * len(right)
    assert sorted(one.out) == list(REQUESTS)


@pytest.mark.parametrize("rollout", [{}, {"max_concurrent_requests": 3}, {"enable_prefix_caching": False, "max_concurrent_requests": 7}])
def test_a_request_is_the_same_in_any_batch(policy: Path, each_alone: dict[int, Sampled], rollout: dict[str, Any]) -> None:
    right, order = each_alone, random.Random(len(rollout))
    one, waiting = driven(policy, **rollout), list(REQUESTS)
    order.shuffle(waiting)
    while waiting or one.engine:
        while waiting and order.random() < 0.4:
            key = waiting.pop()
            ids, settings = REQUESTS[key]
            one.add(key, ids, **settings)
        if one.engine:
            one.engine.step()
            if len(one.out) < len(REQUESTS) and order.random() < 0.2:  # and one that is aborted
                one.add("none", prompt(99, 40), seed=1)
                one.engine.step()
                if "none" not in one.out:
                    one.engine.abort(one.names["none"])
        one.out.pop("none", None)
    assert [key for key in right if not same(right[key], one.out[key])] == []


def test_seeds_differ_and_greedy_takes_the_likeliest(policy: Path) -> None:
    one, model = driven(policy), loaded(policy)
    for seed in range(8):
        one.add(seed, prompt(3, 20), seed=seed)
    one.add("greedy", prompt(3, 20), seed=0, temperature=0.0)
    out = one.finish()
    assert len({tuple(out[seed].token_ids) for seed in range(8)}) > 5
    with torch.no_grad():
        ids = [*prompt(3, 20), *out["greedy"].token_ids]
        best = model(torch.tensor([ids])).logits[0, 19:-1].argmax(-1)
    assert out["greedy"].token_ids == best.tolist()


def test_top_k_and_top_p_at_every_token(policy: Path) -> None:
    """Log-probs are of the distribution that was cut, and no token comes from outside."""
    one, model = driven(policy, top_k=5, top_p=0.8, temperature=0.9, stop=()), loaded(policy)
    for seed in range(6):
        one.add(seed, prompt(4, 9), seed=seed)
    for sampled in one.finish().values():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt(4, 9), *sampled.token_ids]])).logits[0, 8:-1] / 0.9
        for token, logprob, row in zip(sampled.token_ids, sampled.logprobs.tolist(), logits, strict=True):
            values, order = row.sort(descending=True)
            share = values[:5].softmax(0)
            nucleus = int((share.cumsum(0) < 0.8).sum()) + 1
            assert token in order[:nucleus].tolist()
            right = values[:nucleus].log_softmax(0)[order[:nucleus].tolist().index(token)]
            assert abs(logprob - float(right)) < 1e-5


def test_ends(policy: Path) -> None:
    """EOS and stop strings are kept and are a stop; what is cut has no EOS. A stop string that comes with the last token counts."""
    one = driven(policy, stop=("a",))
    for seed in range(60):
        one.add(seed, prompt(seed, 6), seed=seed, stop=["bc"], max_tokens=None if seed % 2 else 5)
    decode, ends = tiny_tokenizer().decode, set[str]()
    for seed, sampled in one.finish().items():
        text, limit = str(decode(sampled.token_ids, skip_special_tokens=True)), 24 if seed % 2 else 5
        if sampled.finish_reason == "length":
            assert len(sampled.token_ids) == limit and EOS not in sampled.token_ids and "a" not in text and "bc" not in text
            ends.add("length")
        elif sampled.token_ids[-1] == EOS:
            assert EOS not in sampled.token_ids[:-1] and "a" not in text
            ends.add("eos")
        else:
            assert text.endswith(("a", "bc")) and "a" not in text[:-1]
            ends.add("stop")
    assert ends == {"length", "eos", "stop"}
    longest = max(one.out, key=lambda seed: len(one.out[seed].token_ids))
    ids = one.out[longest].token_ids
    last = next(place for place in range(2, len(ids)) if 33 < ord(str(decode([ids[place]]))[0]) < 127 and ids[place] not in ids[:place])
    again = driven(policy)
    again.add(0, prompt(longest, 6), seed=longest, max_tokens=last + 1, stop=[str(decode([ids[last]]))])
    assert again.finish()[0].token_ids == ids[: last + 1] and again.out[0].finish_reason == "stop"


def test_the_generation_config_names_more_ends(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    loaded(policy).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    letters = list(range(60, 120))
    GenerationConfig(eos_token_id=[EOS, *letters]).save_pretrained(folder)
    one = driven(folder)
    for seed in range(20):
        one.add(seed, prompt(seed, 6), seed=seed)
    for sampled in one.finish().values():
        assert not {EOS, *letters} & set(sampled.token_ids[:-1])
        assert (sampled.finish_reason == "stop") == (sampled.token_ids[-1] in {EOS, *letters})
    assert any(sampled.token_ids[-1] in letters for sampled in one.out.values())


def test_the_longest_sample_and_a_prompt_that_leaves_no_room(policy: Path) -> None:
    one = driven(policy, max_model_len=20)
    one.add(0, prompt(0, 15), seed=4, temperature=5.0)
    assert (len(one.finish()[0].token_ids), one.out[0].finish_reason) == (5, "length")
    with pytest.raises(RunError, match="a prompt of 20 tokens leaves no room"):
        one.add(1, prompt(0, 20), seed=0)


def test_no_more_than_max_concurrent_requests_and_first_come_first_served(policy: Path) -> None:
    one = driven(policy, max_concurrent_requests=2, max_response_length=3)
    steps = []
    with patch.object(one.engine._model, "decode", wraps=one.engine._model.decode) as decode:
        for seed in range(5):
            one.add(seed, prompt(seed, 30), seed=seed, temperature=5.0)
        while one.engine:
            one.engine.step()
            steps.append((len(decode.call_args.args[0]), sorted(one.out)))
    assert [rows for rows, _ in steps] == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [out for _, out in steps][2::3] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_an_aborted_request_tells_what_it_has(policy: Path) -> None:
    one = driven(policy, max_concurrent_requests=4)
    for seed in range(6):
        one.add(seed, prompt(7, 30), seed=seed, temperature=1.0)
    assert one.engine.abort(one.names[5]) is None, "it is still waiting"
    for _ in range(3):
        one.engine.step()
    left = [key for key in range(4) if key not in one.out]
    cut = one.engine.abort(one.names[left[0]])
    assert cut is not None and (len(cut.token_ids), len(cut.logprobs), len(cut.versions), cut.finish_reason) == (3, 3, 3, "length")
    whole = driven(policy)
    for seed in range(6):
        whole.add(seed, prompt(7, 30), seed=seed, temperature=1.0)
    whole.finish()
    assert whole.out[left[0]].token_ids[:3] == cut.token_ids
    assert sorted(one.finish()) == [key for key in range(5) if key != left[0]]
    assert all(same(one.out[key], whole.out[key]) for key in one.out)


def test_an_install_in_flight(policy: Path, each_alone: dict[int, Sampled]) -> None:
    """Requests go on; every token is of the weights of its version alone, those before it included as the new weights read them."""
    models = [loaded(policy), loaded(policy, 1), loaded(policy, 2)]
    one = driven(policy, max_concurrent_requests=8, max_response_length=30)
    for key, (ids, settings) in REQUESTS.items():
        one.add(key, ids, **settings)
    for version in (1, 2):
        for _ in range(6):
            one.engine.step()
        assert install(one, models[version], version) == ()
        assert one.engine.version == version
    for key, sampled in one.finish().items():
        ids, settings = REQUESTS[key]
        right = torch.stack([right_logprobs(model, ids, sampled, settings["temperature"] or 1.0) for model in models])
        own = right.gather(0, sampled.versions[None].long())[0]
        torch.testing.assert_close(sampled.logprobs, own, atol=1e-5, rtol=0)
        assert (sampled.versions.diff() >= 0).all()
    assert len(one.out) == len(REQUESTS) and sum(len(sampled.versions.unique()) == 3 for sampled in one.out.values()) >= 4
    one.add("again", REQUESTS[2][0], **REQUESTS[2][1])
    assert float(one.finish()["again"].logprobs[0]) != float(each_alone[2].logprobs[0]), "no prefix of the old weights is left"


def test_sleep(policy: Path, each_alone: dict[int, Sampled]) -> None:
    """Nothing is in the cache meanwhile, weights may come, and samples go on as if nothing had been."""
    one = driven(policy)
    one.add(4, REQUESTS[4][0], **REQUESTS[4][1])
    one.finish()
    cache = one.engine._model._cache
    assert all(layer.keys is not None for layer in cache.layers)
    one.engine.sleep()
    assert all(layer.keys is layer.values is None for layer in cache.layers)
    with pytest.raises(AssertionError, match="sleeping engine"):
        one.add(5, REQUESTS[5][0], seed=0)
    one.engine.wake()
    one.add(4, REQUESTS[4][0], **REQUESTS[4][1])
    assert same(one.finish()[4], each_alone[4])
    one.engine.sleep()
    other = loaded(policy, 1)
    assert install(one, other, 1) == ()
    one.engine.wake()
    ids, settings = REQUESTS[5]
    one.add(5, ids, **settings)
    right = right_logprobs(other, ids, one.finish()[5], settings["temperature"] or 1.0)
    torch.testing.assert_close(one.out[5].logprobs, right, atol=1e-5, rtol=0)


def test_a_damaged_weight_is_named(policy: Path) -> None:
    one = driven(policy)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert install(one, loaded(policy), 1) == ()
    assert install(one, loaded(policy), 2, damage=name) == (name,)


def test_a_tied_output_layer_follows_the_embedding(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path / "tied", tie_word_embeddings=True)
    one, model = driven(folder), loaded(folder, 3)
    assert install(one, model, 1) == ()
    one.add(0, prompt(0, 12), seed=0)
    torch.testing.assert_close(one.finish()[0].logprobs, right_logprobs(model, prompt(0, 12), one.out[0]), atol=1e-5, rtol=0)


def test_eager_attention_and_another_type(policy: Path) -> None:
    right = alone(policy, 1, 4)
    eager = alone(policy, 1, 4, engine_args={"attn_implementation": "eager"})
    for key in (1, 4):
        assert eager[key].token_ids == right[key].token_ids
        torch.testing.assert_close(eager[key].logprobs, right[key].logprobs, atol=1e-5, rtol=0)
    half = driven(policy, dtype="bfloat16")
    assert half.engine._model.model.dtype == torch.bfloat16
    half.add(0, prompt(0, 12), seed=0)
    right_half = right_logprobs(loaded(policy), prompt(0, 12), half.finish()[0])
    assert 0 < (half.out[0].logprobs - right_half).abs().max() < 0.2


def test_embeddings_that_depend_on_the_longest_sample_are_refused(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    }  # fmt: skip
    folder = save_tiny_policy(tmp_path / "long", rope_parameters=rope)
    driven(folder, max_model_len=64)
    with pytest.raises(UserError, match=r"rollout.engine: with samples of up to 100 tokens, more than 64, the model's longrope"):
        driven(folder, max_model_len=100)
