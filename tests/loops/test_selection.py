"""From a round's samples to what is learnt: every rule again, from the lines of samples.jsonl, and whole rules in closed form."""

import math
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.loops.samples_file import SamplesFile, read_lines
from conveyor.loops.select import multi_step
from conveyor.loops.selection import as_completions, as_pairs, selected_rows
from conveyor.pipeline.sampling import Sampled
from conveyor.types import Prompt, Rollout
from tests.loops.conftest import Make

GROUP = st.lists(st.none() | st.integers(-2, 2).map(float), min_size=4, max_size=4)
DRAWS = 4000


def line(scores: Any, index: int = 0, members: Any = None, ids: Any = None) -> dict[str, Any]:
    """A line of samples.jsonl: sample i of prompt `index` says its number."""
    samples = [
        {
            "response": f"answer {place}", "response_ids": ids[place] if ids else [10 + place, 2], "finish_reason": "stop",
            "rewards": {"low": score} if members is None else {name: of_all[place] for name, of_all in members.items()}, "score": score,
        }
        for place, score in enumerate(scores)
    ]  # fmt: skip
    return {"index": index, "row": index + 1, "prompt": f"p{index}", "prompt_ids": [1, 5], "samples": samples}


def pairs(rows: Any) -> list[tuple[int, int]]:
    return [(row["chosen_ids"][0] - 10, row["rejected_ids"][0] - 10) for row in rows]


@given(scores=GROUP, keep=st.integers(1, 4), least=st.none() | st.integers(-1, 1).map(float))
@settings(deadline=None)
def test_the_best_are_learnt(make_loop: Make, scores: Any, keep: int, least: float | None) -> None:
    recipe = make_loop("rejection_sampling", Path("unused"), {"select.keep": keep, "select.min_score": least})
    rows = list(selected_rows(recipe, 0, [line(scores)]))
    wanted = sorted((score for score in scores if score is not None), reverse=True)[:keep]
    assert [row["score"] for row in rows] == [score for score in wanted if least is None or score >= least]
    for row in rows:
        place = row["sample"]
        assert row["score"] == scores[place] and row["completion"] == f"answer {place}" and row["completion_ids"] == [10 + place, 2]
        assert (row["row"], row["prompt"], row["prompt_ids"]) == (1, "p0", [1, 5])
    assert len({row["sample"] for row in rows}) == len(rows)


@given(scores=GROUP, limit=st.none() | st.integers(1, 3))
@settings(deadline=None)
def test_pairs_of_a_group(make_loop: Make, scores: Any, limit: int | None) -> None:
    def chosen(kind: str, **more: Any) -> list[tuple[int, int]]:
        changes = {"select.pairs": kind, **{f"select.{key}": value for key, value in more.items()}}
        return pairs(selected_rows(make_loop("iterative_dpo", Path("unused"), changes), 0, [line(scores)]))

    known = [place for place, score in enumerate(scores) if score is not None]
    every = {(a, b): scores[a] - scores[b] for a in known for b in known if scores[a] > scores[b]}
    found = chosen("all", max_pairs=limit)
    assert len(found) == len(set(found)) == min(len(every), limit or 99)
    margins = sorted(every.values(), reverse=True)
    assert [every[pair] for pair in found] == margins[: len(found)]
    best_worst = chosen("best_worst")
    assert [every[pair] for pair in best_worst] == margins[:1]


def test_equal_tokens_make_no_pair(make_loop: Make) -> None:
    """Two samples that say the same may have different scores where a reward looks at more than the text, or is a url."""
    recipe = make_loop("iterative_dpo", Path("unused"))
    assert list(selected_rows(recipe, 0, [line([1.0, 0.0], ids=[[7, 2], [7, 2]])])) == []


def test_the_pair_an_ensemble_disagrees_on(make_loop: Make, loop_data: Path) -> None:
    """Deviations over members of the differences (0,1): 0, (0,2): 2.5, (1,2): 2.5; of the last two the larger mean, 2, wins. With η
    so small that only the best one is kept there is no pair."""
    rewards = [{"name": name, "function": f"{loop_data / 'rewards.py'}:{name}"} for name in ("low", "even")]
    changes = {"rewards": rewards, "select.pairs": "max_uncertainty"}
    recipe = make_loop("iterative_dpo", Path("unused"), changes)
    members = {"low": [4.5, 4.0, 0.0, None], "even": [2.5, 2.0, 3.0, 9.0]}
    group = line([7.0, 6.0, 3.0, 9.0], members=members)
    assert pairs(selected_rows(recipe, 0, [group])) == [(0, 2)]
    cold = make_loop("iterative_dpo", Path("unused"), changes | {"select.etas": [1e-9, 1e-10]})
    assert list(selected_rows(cold, 0, [group])) == []


def test_a_draw_depends_on_seed_and_index_alone(make_loop: Make) -> None:
    recipe = make_loop("rso", Path("unused"), {"select.beta": 5.0, "select.accept": 2})
    lines = [line([0.0, 1.0, 2.0, 3.0], index) for index in range(40)]
    whole = list(selected_rows(recipe, 0, lines))
    assert [row for one in lines for row in selected_rows(recipe, 1, [one])] == whole
    assert len({pair for pair in pairs(whole)}) > 3, "and on these"
    other = recipe.model_copy(update={"seed": 4})
    assert list(selected_rows(other, 0, lines)) != whole


def accepted_sets(scores: list[float], beta: float, k: int) -> dict[frozenset[int], float]:
    """P(the accepted set) of statistical rejection by enumeration: every order of every pass, every outcome of every toss."""
    found: Counter[frozenset[int]] = Counter()

    def passes(left: frozenset[int], accepted: frozenset[int], weight: float) -> None:
        if not left or len(accepted) == k:
            found[accepted] += weight
            return
        top, orders = max(scores[sample] for sample in left), list(permutations(left))
        for order in orders:
            tosses(order, 0, left, accepted, weight / len(orders), top)

    def tosses(order: Any, place: int, left: Any, accepted: Any, weight: float, top: float) -> None:
        if place == len(order) or len(accepted) == k:
            if left != frozenset(order) or len(accepted) == k:
                passes(left, accepted, weight)
            return
        sample = order[place]
        chance = math.exp((scores[sample] - top) / beta)
        tosses(order, place + 1, left - {sample}, accepted | {sample}, weight * chance, top)
        if chance < 1:
            tosses(order, place + 1, left, accepted, weight * (1 - chance), top)

    passes(frozenset(range(len(scores))), frozenset(), 1.0)
    return dict(found)


def test_rso_as_a_whole_has_the_papers_distribution(make_loop: Make) -> None:
    """Three samples, two accepted, and the pair they make: against the enumeration of every order and toss."""
    scores, beta = [0.0, 1.0, 2.5], 1.5
    recipe = make_loop("rso", Path("unused"), {"select.beta": beta, "select.accept": 2, "rollout.n_samples_per_prompt": 3})
    wanted = accepted_sets(scores, beta, 2)
    assert sum(wanted.values()) == pytest.approx(1)
    found = Counter(pairs(selected_rows(recipe, 0, (line(scores, index) for index in range(DRAWS)))))
    assert sum(found.values()) == DRAWS
    for (better, worse), count in found.items():
        chance = wanted[frozenset((better, worse))]
        assert better > worse and abs(count / DRAWS - chance) <= 4 * math.sqrt(chance * (1 - chance) / DRAWS)


def test_steps_of_a_run_multiply_to_the_whole_tilt() -> None:
    """η = 4, 2, 1: the chance to be accepted in every round is exp((r − r_max)/η_T), whatever lies between; and each η of a recipe
    is used in its own round."""
    rng, scores, etas = np.random.default_rng(8), [0.0, 0.8, 1.5], [4.0, 2.0, 1.0]
    kept = Counter[int]()
    for _ in range(DRAWS):
        rounds = [set(multi_step(scores, etas[:number], eta, rng)) for number, eta in enumerate(etas)]
        kept.update(set.intersection(*rounds))
    for sample, score in enumerate(scores):
        chance = math.exp((score - 1.5) / etas[-1])
        assert abs(kept[sample] / DRAWS - chance) <= 4 * math.sqrt(chance * (1 - chance) / DRAWS)


@pytest.mark.parametrize("number", [0, 1])
def test_each_round_has_its_own_eta(make_loop: Make, number: int) -> None:
    """Two samples make a pair if the worse one is accepted: exp(−1·1/2) in the first round, exp(−1·(1/0.5 − 1/2)) in the second."""
    recipe = make_loop("iterative_dpo", Path("unused"), {"select.etas": [2.0, 0.5], "rollout.n_samples_per_prompt": 2})
    rows = list(selected_rows(recipe, number, (line([1.0, 0.0], index) for index in range(DRAWS))))
    chance = math.exp(-[1 / 2, 1 / 0.5 - 1 / 2][number])
    assert abs(len(rows) / DRAWS - chance) <= 4 * math.sqrt(chance * (1 - chance) / DRAWS)


def rollout(prompt: Prompt, sample: int, ids: list[int], **more: Any) -> Rollout:
    none = torch.zeros(len(ids))
    return Rollout(prompt, sample, torch.tensor(ids), none, none.int(), "stop", "text", **more)


def test_tokens_of_tools_are_not_learnt_and_failed_turns_not_chosen(make_loop: Make, tmp_path: Path) -> None:
    prompt = Prompt(0, 0, (1, 5), "chat", messages=({"role": "user", "content": "p"},))
    played = rollout(prompt, 0, [7, 8, 9, 2], sampled=torch.tensor([True, False, False, True]), turns=2)
    failed = rollout(prompt, 1, [7, 2], failure="the function raised")
    plain = rollout(prompt, 2, [6, 2])
    with SamplesFile(tmp_path / "samples.jsonl") as file:
        file.append(Sampled(prompt, (played, failed, plain), ({"low": 1.0}, {"low": 5.0}, {"low": 0.0}), (1.0, 5.0, 0.0)))
    file.complete()
    (written,) = read_lines(tmp_path / "samples.jsonl")
    assert written["prompt"] == [{"role": "user", "content": "p"}]
    assert [sample["score"] for sample in written["samples"]] == [1.0, None, 0.0]
    assert [sample.get("response_mask") for sample in written["samples"]] == [[1, 0, 0, 1], None, None]
    (row,) = selected_rows(make_loop("iterative_dpo", Path("unused")), 0, [written])
    (pair,) = as_pairs([row], Path("selected.jsonl"))
    assert pair.chosen.ids.tolist() == [1, 5, 7, 8, 9, 2] and pair.chosen.mask.tolist() == [False, False, True, False, False, True]
    assert pair.rejected.ids.tolist() == [1, 5, 6, 2] and pair.rejected.mask.tolist() == [False, False, True, True]
    assert pair.chosen.place == "selected.jsonl:1"
    (row,) = selected_rows(make_loop("rejection_sampling", Path("unused")), 0, [written])
    assert as_completions([row], Path("x"))[0].sample.mask.tolist() == [False, False, True, False, False, True]


def test_a_file_of_samples_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "round" / "samples.jsonl"
    prompts = {index: Prompt(index, 9 - index, (1,), f"p{index} \u2028é") for index in (4, 5, 6)}

    def sampled(index: int) -> Sampled:
        return Sampled(prompts[index], (rollout(prompts[index], 0, [2]),), ({},), (None,))

    file = SamplesFile(path)
    assert file.done() == set()
    with file:
        file.append(sampled(6))
        file.append(sampled(4))
    growing = path.with_name(".samples.jsonl.growing")
    growing.write_bytes(growing.read_bytes()[:-5])
    file = SamplesFile(path)
    assert file.done() == {6} and not path.exists()
    with file:
        file.append(sampled(5))
        file.append(sampled(4))
    file.complete()
    assert [line["index"] for line in read_lines(path)] == [4, 5, 6] and [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().count(b"\n") == 3
