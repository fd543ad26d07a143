"""A rollout worker whose engine is transformers': the same answers to the same calls, without vLLM anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conveyor.config import sections
from conveyor.models.language_model import load_language_model
from conveyor.models.sampling import log_distribution
from conveyor.models.slot_model import SlotModel
from conveyor.types import Rollout, SampleId
from conveyor.workers.reports import EvaluationAborted, InstallReport, SampleDone
from conveyor.workers.rollout import RolloutError, RolloutWorker
from conveyor.workers.weight_sync import publish
from tests.conftest import ENGINE_MODEL_LENGTH, ENGINE_ROLLOUT, ENGINE_SEED
from tests.workers.conftest import MULTI_TURN
from tests.workers.test_rollout import call, prompt, same, transformers_logprobs
from tests.workers.test_rollout_turns import check_logprobs, model_of, playing_prompt

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here() -> Iterator[None]:
    """Workers in this process, of which they choose the cores."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.fixture
def worker(here: None, tiny_policy: Path) -> Iterator[RolloutWorker]:
    started = start(tiny_policy)
    yield started
    started.close()


def start(policy: Path, **changes: Any) -> RolloutWorker:
    rollout = ENGINE_ROLLOUT.model_copy(update={"engine": "transformers", **changes})
    core = min(os.sched_getaffinity(0))
    return RolloutWorker(sections.Model(path=str(policy)), rollout, seed=ENGINE_SEED, cores=(core,), max_model_len=ENGINE_MODEL_LENGTH)


def install(worker: RolloutWorker, model: torch.nn.Module, version: int) -> InstallReport:
    publication = publish(model.named_parameters(), version, "actor", verify=True, put=lambda bucket: bucket)
    assert publication is not None
    with patch("ray.get", lambda bucket: bucket):  # there is no object store
        return worker.install(publication)


def leaving(worker: RolloutWorker, count: int) -> list[tuple[SampleDone | EvaluationAborted, Rollout | None]]:
    """The next samples that leave, with their reports."""
    stream, found = worker.stream(), list[Any]()
    while len(found) < count:
        reports, rollouts = next(stream), iter(next(stream))
        found += [(report, next(rollouts) if isinstance(report, SampleDone) else None) for report in reports]
    return found


def test_samples_of_several_prompts(worker: RolloutWorker, tiny_policy: Path) -> None:
    """Case 22, and logs that tell who worked where."""
    info = worker.ready()
    assert info.worker == "rollout" and info.device.startswith("cpu ")
    prompts, model = [prompt(i, 5 + 3 * i) for i in range(12)], model_of(tiny_policy)
    together = worker.generate(prompts, 2)
    assert [rollout.id for rollout in together] == [SampleId(i, k) for i in range(12) for k in range(2)]
    for rollout in together:
        torch.testing.assert_close(rollout.logprobs, transformers_logprobs(model, rollout), atol=1e-5, rtol=0)
        assert "</s>" not in rollout.text
    for alone, batched in zip(worker.generate([prompts[5]], 2), together[10:12], strict=True):
        assert torch.equal(alone.response_ids, batched.response_ids)
    (warm,) = worker.generate([prompts[3]], 1, temperature=0.7)
    torch.testing.assert_close(warm.logprobs, transformers_logprobs(model, warm, 0.7), atol=1e-5, rtol=0)
    (greedy,) = worker.generate([prompts[3]], 1, greedy=True)
    worker.submit(prompts[3], 2, greedy=True)
    left = {report.id: rollout for report, rollout in leaving(worker, 3)}
    assert torch.equal(left[SampleId(3, 2)].response_ids, greedy.response_ids)  # type: ignore[union-attr]
    assert all(same(left[SampleId(3, k)], together[6 + k]) for k in range(2))  # type: ignore[arg-type]


def test_an_evaluation_gives_way_to_an_install_and_training_samples_do_not(worker: RolloutWorker, tiny_policy: Path) -> None:
    models = [model_of(tiny_policy), model_of(tiny_policy, 1)]
    for i in range(1, 4):
        worker.evaluate(prompt(-i, 20), 4, 0)
    for i in range(4):
        worker.submit(prompt(i, 100), 4)
    report = install(worker, models[1], 1)
    assert (report.version, report.mismatched) == (1, ()) and report.nbytes > 0
    worker.evaluate(prompt(-6, 20), 1, 0)  # too late: the engine holds version 1
    found = leaving(worker, 29)
    aborted = {item.id for item, _ in found if isinstance(item, EvaluationAborted)}
    assert SampleId(-6, 0) in aborted and {item.id for item, _ in found if item.id.group >= 0} == {
        (i, k) for i in range(4) for k in range(4)
    }
    for item, rollout in found:
        assert item.id.group < 0 or rollout is not None
        if rollout is not None:
            check_logprobs(rollout, *models)
            assert item.id.group >= 0 or set(rollout.versions.tolist()) == {0}
    assert {1} <= {int(rollout.versions[-1]) for _, rollout in found if rollout is not None}


def test_renewal_failure_and_end(worker: RolloutWorker) -> None:
    earlier = worker.stream()
    worker.submit(prompt(1, 100), 4)
    assert len(next(earlier)) == len(next(earlier)) > 0
    worker.renew()
    worker.submit(prompt(90), 1)
    assert leaving(worker, 1)[0][0].id == SampleId(90, 0)
    assert len(list(earlier)) % 2 == 0  # it ends, with reports and their rollouts
    wrong = publish([("model.norm.weight", torch.zeros(3))], 1, "actor", verify=False, put=lambda bucket: bucket)
    assert wrong is not None
    with patch("ray.get", lambda bucket: bucket), pytest.raises(RolloutError, match="the rollout engine failed"):
        worker.install(wrong)
    with pytest.raises(RolloutError):
        worker.submit(prompt(0), 1)


@pytest.mark.slow
def test_samples_of_several_turns(here: None, tiny_policy: Path) -> None:
    playing = start(tiny_policy, multi_turn=MULTI_TURN)
    model = model_of(tiny_policy)
    rollouts = playing.generate([playing_prompt(i, 6 + 11 * i, do="talks") for i in range(6)], 2)
    for rollout in rollouts:
        check_logprobs(rollout, model)
        assert rollout.turns == 3 and "first" in rollout.text and "second" in rollout.text
    (alone, _) = playing.generate([rollouts[6].prompt], 2)
    assert torch.equal(alone.response_ids, rollouts[6].response_ids)
    playing.close()


@pytest.mark.slow
def test_logprobs_equal_vllm(engine: Any, worker: RolloutWorker, tiny_policy: Path) -> None:
    """Of samples of vLLM's, token by token through the cache; and both engines take the same likeliest tokens."""
    prompts = [prompt(i, 4 + 29 * i) for i in range(6)]
    for theirs, ours in zip(call(engine.generate.remote(prompts, 1, greedy=True)), worker.generate(prompts, 1, greedy=True), strict=True):
        assert torch.equal(theirs.response_ids, ours.response_ids)
        assert (theirs.finish_reason, theirs.text) == (ours.finish_reason, ours.text)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)
    sampled = call(engine.generate.remote(prompts, 2, temperature=0.7))
    slots = SlotModel(load_language_model(sections.Model(path=str(tiny_policy), remove_padding=False)), "tiny")
    rows = [list(rollout.prompt.token_ids) for rollout in sampled]
    slots.fill([ids[:-1] for ids in rows], range(len(rows)))
    found: list[list[float]] = [[] for _ in rows]
    for place in range(max(len(rollout.response_ids) for rollout in sampled)):
        logits = slots.decode([ids[-1] for ids in rows], [len(ids) - 1 for ids in rows])
        logprobs = log_distribution(logits, torch.full((len(rows),), 0.7), -1, 1.0)
        for row, (ids, rollout) in enumerate(zip(rows, sampled, strict=True)):
            if place < len(rollout.response_ids):
                ids.append(int(rollout.response_ids[place]))
                found[row].append(float(logprobs[row, ids[-1]]))
    for rollout, ours_too in zip(sampled, found, strict=True):
        torch.testing.assert_close(torch.tensor(ours_too), rollout.logprobs, atol=1e-5, rtol=0)


WITHOUT_VLLM = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Forbidden())
from conveyor.config import sections
from conveyor.types import Prompt
from conveyor.workers import cluster, start
from conveyor.workers.rollout import RolloutWorker

cluster.set_environment(False)
rollout = sections.Rollout(engine="transformers", max_response_length=4)
worker = RolloutWorker(sections.Model(path=sys.argv[1]), rollout, seed=0, cores=(int(sys.argv[2]),), max_model_len=64)
(rollout,) = worker.generate([Prompt(0, 0, (1, 7, 8), "")], 1)
assert len(rollout.response_ids) and not any(name.partition(".")[0] == "vllm" for name in sys.modules)
worker.close()
print("sampled")
"""


@pytest.mark.slow
def test_nothing_imports_vllm(tiny_policy: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, str(tiny_policy), core], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert answer.returncode == 0 and answer.stdout.strip().endswith("sampled"), answer.stderr
