"""Sampling without training on a real engine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.cli import main
from conveyor.config import sections
from conveyor.pipeline.row_store import RowStore
from conveyor.pipeline.sampling import Sampled, Sampler
from conveyor.pipeline.sampling_recipe import sampling_recipe
from conveyor.types import Prompt
from conveyor.workers.placement import Placement
from tests.tiny import save_tiny_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def sampler(engine: Any, restored: None, tiny_policy: Path, tmp_path: Path) -> Iterator[Sampler]:
    """Of the session's engine, with no weights installed."""
    raw = {"model": {"path": str(tiny_policy)}, "data": {"path": "d"}, "rollout": {"n_samples_per_prompt": 2, "max_concurrent_requests": 8}}
    with (
        Placement.create({"others": 0.1}, sections.Ray()) as placement,
        Sampler(sampling_recipe(raw, str(tmp_path / "out")), placement, engines=[engine]) as made,
    ):
        yield made


def sample(sampler: Sampler) -> dict[int, Sampled]:
    found: dict[int, Sampled] = {}
    prompts = [Prompt(index, index, (1, *range(9, 9 + 24 + index)), "") for index in (0, 3, 4)]
    sampler.sample(prompts, lambda sampled: found.__setitem__(sampled.prompt.index, sampled))
    return found


def test_samples_are_those_of_the_weights_that_were_installed(sampler: Sampler, tiny_policy: Path, tmp_path: Path) -> None:
    """Prompts begin alike, and come again after an install: no cached prefix of the old weights may answer for the new ones (case 14)."""
    other = save_tiny_policy(tmp_path / "other", seed=11)
    with pytest.raises(AssertionError, match="install"):
        sample(sampler)
    of_weights = []
    for folder in (tiny_policy, other, tiny_policy):
        sampler.install(folder)
        found = sample(sampler)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for index, sampled in found.items():
            assert sampled.prompt.index == index and [rollout.sample for rollout in sampled.rollouts] == [0, 1]
            for rollout in sampled.rollouts:
                ids = torch.tensor([[*sampled.prompt.token_ids, *rollout.response_ids.tolist()]])
                with torch.no_grad():
                    logprobs = model(ids).logits[0, len(sampled.prompt.token_ids) - 1 : -1].log_softmax(-1)
                expected = logprobs.gather(1, rollout.response_ids[:, None])[:, 0]
                torch.testing.assert_close(rollout.logprobs, expected, atol=1e-5, rtol=0)
        of_weights.append({index: [rollout.response_ids.tolist() for rollout in sampled.rollouts] for index, sampled in found.items()})
    assert of_weights[0] == of_weights[2], "the same seeds"
    assert all(of_weights[0][index] != of_weights[1][index] for index in of_weights[0])


def test_a_killed_generate_gives_the_rows_of_one_that_ran_through(
    engine: Any, restored: None, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}", "answer": i}) + "\n" for i in range(10)))

    def on_the_engine(recipe: Any, placement: Placement, *, replay: bool, on_ready: Callable[[str], None]) -> Sampler:
        made = Sampler(recipe, placement, engines=[engine])
        made.install(tiny_policy)
        return made

    monkeypatch.setattr("conveyor.pipeline.sampled_rows.Sampler", on_the_engine)

    def generate(folder: str) -> list[str]:
        arguments = ["generate", str(tiny_policy), "--data", str(tmp_path / "prompts.jsonl"), "--n", "2", "--logprobs"]
        assert main([*arguments, "--devices.rollout", "0.1", "--output-dir", str(tmp_path / folder)]) == 0
        return (tmp_path / folder / "samples.jsonl").read_text().splitlines()

    append = RowStore.append

    def killed(store: RowStore, index: int, rows: list[dict[str, Any]]) -> None:
        if len(store.done) == 4:
            store._lines.write(b'{"index": 3, "rows": [{"row')
            raise OSError("killed")
        append(store, index, rows)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr(RowStore, "append", killed)
        generate("resumed")
    assert not (tmp_path / "resumed" / "samples.jsonl").exists()
    resumed, whole = generate("resumed"), generate("whole")
    rows = [json.loads(line) for line in whole]
    assert [(row["row"], row["sample"]) for row in rows] == [(i + 1, k) for i in range(10) for k in range(2)]
    for one, other in zip(map(json.loads, resumed), rows, strict=True):
        assert {**one, "logprobs": None, "logprob": None} == {**other, "logprobs": None, "logprob": None}
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-6)
