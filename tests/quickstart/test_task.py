import json
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.quickstart import task
from conveyor.quickstart.task import Problem, Sizes, generate, is_right, mistake, problems, slip

SMALL = Sizes(heldout=60, demonstrations=400, pairs_heldout=50, pairs=300, prompts=200, judged=300, steps=200)
SORTED = st.sets(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=task.SHORTEST, max_size=task.LONGEST).map(
    lambda letters: "".join(sorted(letters))
)


@pytest.fixture(scope="module")
def rows():
    return generate(0, SMALL)


def test_a_problem_by_hand():
    problem = Problem("dbfac")
    assert problem.prompt == "Sort: d b f a c"
    assert problem.answer == "a b c d f"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("a b c d f", True),
        ("a b c d", False),
        ("a b c f d", False),
        ("a b c d f f", False),
        ("abcdf", False),
        ("a b c d f ", False),
        ("", False),
    ],
)
def test_the_checker_takes_the_exact_answer_only(response, right):
    assert is_right(response, Problem("dbfac").answer) is right


def test_no_prompt_is_met_twice(rows):
    prompts = [row["prompt"] for of_file in rows.values() for row in of_file]
    assert len(set(prompts)) == len(prompts) == 60 + 400 + 50 + 300 + 200 + 300 + 200


def test_the_full_files_keep_the_heldout_prompts_apart():
    rows = generate(0)
    heldout = {row["prompt"] for row in rows.pop("heldout")}
    assert len(heldout) == Sizes().heldout
    assert not heldout & {row["prompt"] for of_file in rows.values() for row in of_file}


def test_rows_have_the_columns_that_recipes_read(rows):
    columns = {name: {frozenset(row) for row in of_file} for name, of_file in rows.items()}
    assert columns == {
        "heldout": {frozenset(("prompt", "answer"))},
        "prompts": {frozenset(("prompt", "answer"))},
        "sft": {frozenset(("prompt", "completion"))},
        "pairs": {frozenset(("prompt", "chosen", "rejected"))},
        "pairs_heldout": {frozenset(("prompt", "chosen", "rejected"))},
        "judged": {frozenset(("prompt", "completion", "label", "reward", "class"))},
        "steps": {frozenset(("prompt", "completions", "labels"))},
    }


def test_about_half_of_the_demonstrations_are_sloppy(rows):
    wrong = sum(not is_right(row["completion"], answer_of(row["prompt"])) for row in rows["sft"])
    assert 0.4 < wrong / len(rows["sft"]) < 0.6


def test_of_a_pair_the_chosen_answer_is_right_and_the_rejected_is_not(rows):
    for row in rows["pairs"]:
        assert is_right(row["chosen"], answer_of(row["prompt"]))
        assert not is_right(row["rejected"], answer_of(row["prompt"]))


def test_an_answer_is_judged_by_its_letters(rows):
    for row in rows["judged"]:
        right = is_right(row["completion"], answer_of(row["prompt"]))
        assert row["label"] is right
        assert (row["reward"] == 1.0) is right
        assert right or row["class"] == "hasty"
    assert {row["label"] for row in rows["judged"]} == {True, False}


def test_the_steps_of_a_solution_are_right_up_to_its_slip(rows):
    slipped = 0
    for row in rows["steps"]:
        letters = row["prompt"].removeprefix("Sort: ").split(" ")
        right = [step == " ".join(sorted(letters[: i + 1])) for i, step in enumerate(row["completions"])]
        assert row["labels"] == right
        assert len(right) == len(letters)
        assert right == sorted(right, reverse=True)
        slipped += not right[-1]
    assert 0.4 < slipped / len(rows["steps"]) < 0.6


def test_the_seed_decides(rows):
    assert json.dumps(generate(0, SMALL)) == json.dumps(rows)
    assert json.dumps(generate(1, SMALL)) != json.dumps(rows)


def test_problems_have_different_letters_and_the_promised_length():
    for problem in islice(problems(random.Random(3)), 200):
        assert task.SHORTEST <= len(problem.letters) <= task.LONGEST
        assert len(set(problem.letters)) == len(problem.letters)


@given(letters=SORTED, seed=st.integers(0, 2**32))
def test_a_slip_or_mistake_is_never_right(letters, seed):
    assert slip(letters, random.Random(seed)) != letters
    assert mistake(letters, random.Random(seed)) != letters


@given(letters=SORTED, seed=st.integers(0, 2**32))
def test_a_slip_is_small(letters, seed):
    """One letter fewer, one more, or the same ones in another order."""
    slipped = slip(letters, random.Random(seed))
    assert abs(len(slipped) - len(letters)) <= 1
    assert set(slipped) <= set(letters)
    if len(slipped) == len(letters):
        assert sorted(slipped) == list(letters)


def answer_of(prompt):
    return " ".join(sorted(prompt.removeprefix("Sort: ").split(" ")))
