"""How long prompts and responses are, and which groups have equal rewards: what a simulation needs to know of the samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conveyor.config import UserError
from conveyor.types import SampleId


class Size(NamedTuple):
    """Tokens of a sample."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Means over a workload, in tokens."""

    prompt: float
    response: float
    resident: float
    """Of a sample that is running at a moment picked at random, prompt and response so far. Long samples run longer: of the response
    that is Σ R² / (2 Σ R), as for the age of what is found in service in renewal theory."""
    longest: int
    """Prompt and response of the longest sample."""


def drawn_for(*numbers: int) -> float:
    """A number from 0 to 1, without 1, which looks random and follows from the numbers alone, whatever else is drawn."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest()) / 2**48


class Workload:
    """The samples of a run.

    Example: `Workload.draw("uniform:low=10,high=90", groups=64, samples_per_group=8, prompt=200)`.
    """

    def __init__(self, responses: NDArray[np.int64], prompts: NDArray[np.int64], equal: float | frozenset[int] = 0.0) -> None:
        """Args:
        responses: [groups, samples a group] tokens, at least 1; groups are counted through all steps. Groups beyond them, which dynamic
            sampling may come to, have the sizes of these in turn.
        prompts: [groups] tokens.
        equal: groups whose rewards are all equal: a share of all (drawn by group, always the same ones), or which.
        """
        assert responses.ndim == 2 and prompts.shape == responses.shape[:1], "one prompt a group, one row of responses a prompt"
        assert responses.size == 0 or responses.min() >= 1, "a response has at least one token"
        self.responses, self.prompts, self._equal = responses, prompts, equal
        # Plain lists: reading single numbers out of an array is several times slower.
        self._sizes = [[Size(p, r) for r in row] for p, row in zip(prompts.tolist(), responses.tolist(), strict=True)]

    @classmethod
    def draw(
        cls, lengths: str | Lengths, groups: int, samples_per_group: int, prompt: int = 128, seed: int = 0, equal: float = 0.0
    ) -> Workload:
        """Responses drawn independently; every prompt has `prompt` tokens. The same seed gives the same lengths."""
        law = parse_lengths(lengths) if isinstance(lengths, str) else lengths
        drawn = law.draw(groups * samples_per_group, np.random.default_rng(seed))
        return cls(drawn.reshape(groups, samples_per_group), np.full(groups, prompt, dtype=np.int64), equal)

    @cached_property
    def facts(self) -> LengthFacts:
        responses, prompt = self.responses.astype(float), float(self.prompts.mean())
        resident = (responses**2).sum() / (2 * responses.sum())
        return LengthFacts(prompt, float(responses.mean()), prompt + float(resident), int(self.prompts.max() + self.responses.max()))

    @property
    def equal_share(self) -> float:
        """Of the groups, those whose rewards are all equal."""
        return len(self._equal) / len(self._sizes) if isinstance(self._equal, frozenset) else self._equal

    def equal(self, group: int) -> bool:
        """Whether a group's rewards are all equal."""
        if isinstance(self._equal, frozenset):
            return group % len(self._sizes) in self._equal
        return drawn_for(group) < self._equal

    def at(self, group: int, sample: int) -> Size:
        return self._sizes[group % len(self._sizes)][sample]

    def size(self, sample: SampleId) -> Size:
        return self.at(sample.group, sample.sample)

    def sizes(self, samples: Sequence[SampleId]) -> list[Size]:
        known, count = self._sizes, len(self._sizes)
        return [known[group % count][number] for group, number in samples]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A law of response lengths, in tokens.

    | law        | parameters  | length                                                                    |
    |------------|-------------|---------------------------------------------------------------------------|
    | constant   | value       | value                                                                     |
    | uniform    | low, high   | every whole number from low to high alike                                 |
    | lognormal  | mean, sigma | exp of a normal with deviation sigma, scaled to the mean                  |
    | pareto     | mean, alpha | heavy-tailed: P(length > x) = (x₀/x)^alpha from x₀ = mean (alpha − 1)/alpha |

    All but constant take a `cap`: longer ones are cut there, as by `rollout.max_response_length`. The mean is the one before the cut.
    """

    law: str
    parameters: dict[str, float]
    cap: int | None = None

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths, at least 1 each."""
        p = self.parameters
        match self.law:
            case "constant":
                drawn = np.full(count, p["value"])
            case "uniform":
                drawn = random.integers(int(p["low"]), int(p["high"]), size=count, endpoint=True).astype(float)
            case "lognormal":
                drawn = random.lognormal(np.log(p["mean"]) - p["sigma"] ** 2 / 2, p["sigma"], size=count)
            case _:
                shortest = p["mean"] * (p["alpha"] - 1) / p["alpha"]
                drawn = shortest * (1 + random.pareto(p["alpha"], size=count))
        # Cut before rounding: a heavy tail can pass what an int64 holds.
        return np.clip(drawn, 1, self.cap or 2**40).round().astype(np.int64)


_LAWS = {"constant": ("value",), "uniform": ("low", "high"), "lognormal": ("mean", "sigma"), "pareto": ("mean", "alpha")}


def parse_lengths(text: str, cap: int | None = None) -> Lengths:
    """A law from text such as `lognormal:mean=800,sigma=1,cap=4096`, or a plain number, which is constant.

    Args:
        cap: no response is longer, whatever the text says.

    Raises:
        UserError: no such law, or a parameter is missing, unknown or out of range.
    """
    if text.strip().isdigit():
        text = f"constant:value={text.strip()}"
    law, _, rest = text.partition(":")
    if law not in _LAWS:
        raise UserError(f"--lengths: {text!r}: no such law; one of {', '.join(_LAWS)}, e.g. lognormal:mean=800,sigma=1,cap=4096")
    given: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        try:
            if name.strip() in given:
                raise UserError(f"--lengths: {name.strip()} is given twice")
            given[name.strip()] = float(value)
        except ValueError:
            raise UserError(f"--lengths: {part!r} is not NAME=NUMBER") from None
    own_cap = given.pop("cap", cap)
    if own_cap is not None and cap is not None and own_cap >= 1:
        own_cap = min(own_cap, cap)
    wanted = _LAWS[law]
    if set(given) != set(wanted):
        raise UserError(f"--lengths: {law} takes {', '.join(wanted)} and cap, not {', '.join(given) or 'nothing'}")
    _check_range(law, given, own_cap)
    return Lengths(law, given, None if own_cap is None else int(own_cap))


def _check_range(law: str, given: dict[str, float], cap: float | None) -> None:
    for name, value in (*given.items(), *([] if cap is None else [("cap", cap)])):
        least = 0.0 if name == "sigma" else 1.0
        if not least <= value < 2**40:
            raise UserError(f"--lengths: {law}: {name} must be at least {least:g}")
    if law == "uniform" and given["low"] > given["high"]:
        raise UserError("--lengths: uniform: low is above high")
    if law == "pareto" and given["alpha"] <= 1:
        raise UserError("--lengths: pareto: alpha must be above 1, else there is no mean")
