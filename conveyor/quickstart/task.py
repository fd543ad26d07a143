"""The quickstart's task: put letters into alphabetical order.

    Sort: d b f a c   →   a b c d f

The right answer is known, so everything can be generated: demonstrations of which half are sloppy (that is what fine-tuning
learns, slips included, and what RLHF then has to unlearn), pairs of a better and a worse answer for the reward model, prompts
for PPO, held-out prompts for the exact checker; and for `recipes/tiny` single answers that are judged, and worked solutions whose
every step is. Pure: the same seed gives the same rows.
"""

from __future__ import annotations

import random
import string
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

INSTRUCTION = "Sort:"
SHORTEST, LONGEST = 4, 6
"""Letters of a prompt, all different."""
SLOPPY_SHARE = 0.5
"""Of the demonstrations."""


@dataclass(frozen=True, slots=True)
class Problem:
    letters: str
    """`dbfac`"""

    @property
    def prompt(self) -> str:
        return f"{INSTRUCTION} {' '.join(self.letters)}"

    @property
    def answer(self) -> str:
        return written(sorted(self.letters))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of each data file."""

    heldout: int = 400
    demonstrations: int = 12_800
    pairs: int = 7_200
    pairs_heldout: int = 400
    prompts: int = 4_096
    judged: int = 4_096
    steps: int = 2_048


Row = dict[str, Any]


def generate(seed: int, sizes: Sizes = Sizes()) -> dict[str, list[Row]]:
    """File name → rows; no two rows of any files share a prompt, so the held-out prompts are met nowhere else.

    heldout, prompts: `prompt`, `answer` · sft: `prompt`, `completion` · pairs: `prompt`, `chosen`, `rejected`
    judged: `prompt`, `completion`, `label` (right), `reward` (share of letters in their places), `class` (of its writer)
    steps: `prompt`, `completions` (the sorted letters so far, one letter more each), `labels` (right)
    """
    rng = random.Random(seed)
    stream = problems(rng)
    return {
        "heldout": [_question(problem) for problem in islice(stream, sizes.heldout)],
        "sft": [_demonstration(problem, rng) for problem in islice(stream, sizes.demonstrations)],
        "pairs_heldout": [_pair(problem, rng) for problem in islice(stream, sizes.pairs_heldout)],
        "pairs": [_pair(problem, rng) for problem in islice(stream, sizes.pairs)],
        "prompts": [_question(problem) for problem in islice(stream, sizes.prompts)],
        "judged": [_judged(problem, rng) for problem in islice(stream, sizes.judged)],
        "steps": [_steps(problem, rng) for problem in islice(stream, sizes.steps)],
    }


def problems(rng: random.Random) -> Iterator[Problem]:
    """Endless (there are 10⁸), none twice."""
    seen: set[str] = set()
    while True:
        letters = "".join(rng.sample(string.ascii_lowercase, rng.randint(SHORTEST, LONGEST)))
        if letters not in seen:
            seen.add(letters)
            yield Problem(letters)


def is_right(response: str, answer: str) -> bool:
    """The exact checker. It knows nothing of the reward model, nor the reward model of it."""
    return response == answer


def slip(letters: str, rng: random.Random) -> str:
    """One small mistake: a letter left out, written twice, or swapped with its neighbour."""
    kind = rng.choice(("left out", "twice", "swapped"))
    i = rng.randrange(len(letters) - (kind == "swapped"))
    if kind == "left out":
        return letters[:i] + letters[i + 1 :]
    if kind == "twice":
        return letters[: i + 1] + letters[i:]
    return letters[:i] + letters[i + 1] + letters[i] + letters[i + 2 :]


def mistake(letters: str, rng: random.Random) -> str:
    """A wrong answer as a reward model should know it: one or two slips, or a letter that does not belong."""
    draw = rng.random()
    if draw < 0.2:
        i = rng.randrange(len(letters))
        other = rng.choice([letter for letter in string.ascii_lowercase if letter != letters[i]])
        return letters[:i] + other + letters[i + 1 :]
    wrong = slip(letters, rng)
    if draw < 0.4:
        twice = slip(wrong, rng)
        return twice if twice != letters else wrong
    return wrong


def written(letters: Iterable[str]) -> str:
    """`abc` → `a b c`"""
    return " ".join(letters)


def _question(problem: Problem) -> Row:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _demonstration(problem: Problem, rng: random.Random) -> Row:
    right = "".join(sorted(problem.letters))
    shown = slip(right, rng) if rng.random() < SLOPPY_SHARE else right
    return {"prompt": problem.prompt, "completion": written(shown)}


def _pair(problem: Problem, rng: random.Random) -> Row:
    right = "".join(sorted(problem.letters))
    return {"prompt": problem.prompt, "chosen": problem.answer, "rejected": written(mistake(right, rng))}


def _judged(problem: Problem, rng: random.Random) -> Row:
    """A careful writer is always right, a hasty one seldom."""
    right, careful = "".join(sorted(problem.letters)), rng.random() < 0.5
    given = right if careful or rng.random() < 0.2 else mistake(right, rng)
    in_place = sum(one == other for one, other in zip(given, right, strict=False)) / max(len(given), len(right))
    return {
        "prompt": problem.prompt,
        "completion": written(given),
        "label": given == right,
        "reward": round(in_place, 3),
        "class": "careful" if careful else "hasty",
    }


def _steps(problem: Problem, rng: random.Random) -> Row:
    """Half of the solutions slip at some step, and carry the mistake on."""
    slips_at = rng.randint(2, len(problem.letters)) if rng.random() < 0.5 else None
    so_far, completions, labels = "", [], []
    for step, letter in enumerate(problem.letters, start=1):
        place = bisect(so_far, letter)
        so_far = so_far[:place] + letter + so_far[place:]
        if step == slips_at:
            so_far = slip(so_far, rng)
        completions.append(written(so_far))
        labels.append(so_far == "".join(sorted(problem.letters[:step])))
    return {"prompt": problem.prompt, "completions": completions, "labels": labels}
