"""Samples of several turns in a real engine, played by functions of tests/episodes/plays.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.config import UserError
from conveyor.types import Rollout
from conveyor.workers.reports import EvaluationAborted, SampleDone
from tests.workers.test_rollout import EOS, Leaving, call, changed, next_sample, prompt, published, same, transformers_logprobs

pytestmark = pytest.mark.slow


@pytest.fixture
def leaving(playing: Any) -> Leaving:
    call(playing.renew.remote())
    return Leaving(playing)


def model_of(folder: Path, seed: int | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model if seed is None else changed(model, seed)


def playing_prompt(index: int, length: int = 12, **columns: Any) -> Any:
    return replace(prompt(index, length), columns=columns)


def check_logprobs(rollout: Rollout, *models: torch.nn.Module) -> None:
    """Each sampled token's is that of its version's model, after all tokens before it; the others' are 0."""
    right = torch.stack([transformers_logprobs(model, rollout) for model in models])
    own = right.gather(0, rollout.versions[None].long())[0] * rollout.sampled_mask
    torch.testing.assert_close(rollout.logprobs, own, atol=1e-5, rtol=0)


def test_a_function_of_one_turn_changes_nothing(engine: Any, playing: Any) -> None:
    prompts = [prompt(i, 5 + 7 * i) for i in range(8)]
    for settings in ({}, {"greedy": True}):
        pairs = zip(*(call(one.generate.remote(prompts, 2, **settings)) for one in (engine, playing)), strict=True)
        for plain, played in pairs:
            assert same(plain, played) and played.sampled is None
            assert (plain.finish_reason, plain.text, plain.turns) == (played.finish_reason, played.text, played.turns)


def test_logprobs_of_every_turn_equal_transformers(playing: Any, tiny_policy: Path) -> None:
    rollouts = call(playing.generate.remote([playing_prompt(i, 6 + 11 * i, do="talks") for i in range(6)], 2))
    model = model_of(tiny_policy)
    for rollout in rollouts:
        check_logprobs(rollout, model)
        assert rollout.turns == 3
        assert "first" in rollout.text and "second" in rollout.text
        assert 3 <= int(rollout.sampled_mask.sum()) <= 15 < len(rollout.response_ids)
    (alone, _) = call(playing.generate.remote([rollouts[6].prompt], 2))
    assert same(alone, rollouts[6])


def test_the_greedy_sample_is_one_more(leaving: Leaving, playing: Any) -> None:
    call(playing.submit.remote(prompt(1), 2, True))
    call(playing.evaluate.remote(prompt(-2), 1, 0, None, True))
    arrived = {rollout.id: rollout for _, rollout in (next_sample(leaving) for _ in range(5))}
    assert set(arrived) == {(1, 0), (1, 1), (1, 2), (-2, 0), (-2, 1)}
    for index, number in ((1, 2), (-2, 1)):
        (greedy,) = call(playing.generate.remote([prompt(index)], 1, greedy=True))
        assert torch.equal(arrived[(index, number)].response_ids, greedy.response_ids)  # type: ignore[index]
    (sampled,) = call(playing.generate.remote([prompt(1)], 1))
    assert same(sampled, arrived[(1, 0)])  # type: ignore[index]


def test_weights_installed_between_turns(leaving: Leaving, playing: Any, tiny_policy: Path, tmp_path: Path) -> None:
    """Training samples go on with the new weights, in whichever turn; those of an evaluation are aborted."""
    models = [model_of(tiny_policy), model_of(tiny_policy, 1)]
    signal = tmp_path / "go"
    for i in range(4):
        call(playing.submit.remote(playing_prompt(i, 20, do="waits_for", path=str(signal)), 1))
    call(playing.evaluate.remote(playing_prompt(-1, 20, do="waits_for", path=str(signal)), 2, 0))
    call(playing.generate.remote([playing_prompt(50, 20, do="talks")], 4))  # more turns than their first
    call(playing.install.remote(published(models[1], 1)))
    signal.touch()
    finished, aborted = list[Rollout](), list[EvaluationAborted]()
    for _ in range(6):
        report, rollout = leaving.next()
        if isinstance(report, SampleDone):
            assert rollout is not None
            finished.append(rollout)
        else:
            aborted.append(report)
    assert {report.id for report in aborted} == {(-1, 0), (-1, 1)}
    for rollout in finished:
        check_logprobs(rollout, *models)
        observed = (~rollout.sampled_mask).nonzero()[0]
        assert rollout.versions[: observed + 1].eq(0).all() and rollout.versions[-1] == 1
        assert rollout.columns == {"answer": "waited"}
    assert call(playing.install.remote(published(models[0], 0))).mismatched == ()


def test_a_turn_that_time_cuts_stays_as_far_as_it_has_come(playing: Any, tiny_policy: Path) -> None:
    rollouts = call(playing.generate.remote([playing_prompt(i, do="late") for i in range(24)], 4))
    cut = [rollout for rollout in rollouts if rollout.finish_reason == "time" and rollout.failure is None]
    assert cut
    model = model_of(tiny_policy)
    for rollout in cut:
        check_logprobs(rollout, model)
        assert rollout.sampled_mask.tolist() == [False] + [True] * (len(rollout.response_ids) - 1)
    for rollout in rollouts:
        assert rollout.failure is None or (rollout.response_ids.tolist(), rollout.sampled_mask.tolist()) == ([EOS], [False])


def test_a_function_that_hangs_stops_nobody_else(leaving: Leaving, engine: Any, playing: Any) -> None:
    """Case 18. What else is played begins anew, with the same tokens; engines go on."""
    alone = call(playing.generate.remote([playing_prompt(i, do="hangs_if", hangs=False) for i in range(4)], 1))
    call(playing.submit.remote(playing_prompt(9, do="hangs_if", hangs=True), 1))
    for rollout in alone:
        call(playing.submit.remote(rollout.prompt, 1))
    arrived = {rollout.id: rollout for _, rollout in (next_sample(leaving) for _ in range(5))}
    hung = arrived.pop((9, 0))  # type: ignore[call-overload]
    assert (hung.finish_reason, hung.turns, hung.failure) == ("time", 1, None)
    assert all(same(rollout, arrived[rollout.id]) for rollout in alone)


def test_a_function_that_raises_ends_the_run_and_names_the_row(leaving: Leaving, playing: Any) -> None:
    call(playing.submit.remote(playing_prompt(3, do="raises"), 1))
    with pytest.raises(
        UserError, match=r"rollout.multi_turn.function: row 4 of the data: raised ValueError: no such tool \(plays.py:\d+\)"
    ):
        leaving.next()
    with pytest.raises(UserError, match="row 4"):
        call(playing.generate.remote([prompt(0)], 1))
