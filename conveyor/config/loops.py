"""Recipes of the methods that sample, select and fit in rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from conveyor.config import sections
from conveyor.config.common import Common
from conveyor.config.offline import Dpo
from conveyor.config.sections import Flag, PositiveFloat, PositiveInt, Section


class Rounds(Section):
    count: PositiveInt = Field(1, description="rounds of sampling, selection and training")
    prompts: PositiveInt | None = Field(None, description="prompts of a round; default: the whole dataset")
    accumulate: Flag | None = Field(
        None, description="train on what all rounds have selected, not only the last; default: on for iterative_dpo, else off"
    )
    start_from: Literal["previous", "first"] = Field("previous", description="policy that a round's training starts from")
    reference: Literal["first", "previous"] | None = Field(
        None, description="DPO's reference: the first policy, or the one that sampled; default: previous for rso, else first"
    )
    max_staleness: Literal[0, 1] = Field(
        0, description="1: a round is sampled by the policy before the newest, while that is trained; 0: they wait for each other"
    )
    keep_engines: Flag | None = Field(
        None, description="engines live through the training; default: on CPU, and where train has devices of its own"
    )


class BestOf(Section):
    keep: PositiveInt = Field(1, description="best samples of a prompt that are learnt")
    min_score: sections.Number | None = Field(None, description="least score of a sample that is learnt; default: any")


class Rso(Section):
    accept: PositiveInt = Field(4, description="samples of a prompt that are accepted")
    beta: PositiveFloat = Field(0.5, description="a sample is accepted with probability exp((r − r_max)/β)")
    pairing: Literal["tournament", "first_round"] = Field(
        "tournament", description="which of their matches are pairs: all, or the first round's"
    )


class PairChoice(Section):
    pairs: Literal["best_worst", "all", "max_uncertainty"] = Field(
        "best_worst", description="of a prompt's samples; max_uncertainty: the pair that the rewards, an ensemble, disagree on most"
    )
    max_pairs: PositiveInt | None = Field(None, description="pairs of one prompt at most, those furthest apart; pairs: all")
    etas: tuple[PositiveFloat, ...] = Field(
        (),
        description="falling η, one a round: samples are thinned with probability exp((r − r_max)(1/η − 1/η of the round before)) "
        "before they are paired (multi-step rejection sampling); default: off",
    )


class LoopRecipe(Common):
    """Methods that sample, select and fit in rounds."""

    method: str
    rewards: tuple[sections.Reward, ...] = Field((), description="summed with their weights")
    roles: dict[str, str] = Field({}, description="role → device group; roles: rollout, names of reward models, score")
    rollout: sections.Rollout = sections.Rollout()
    score: sections.Score = sections.Score()
    rounds: Rounds = Rounds()

    @property
    def longest_sample(self) -> int:
        """Tokens of a row of its training, at most."""
        return max(self.data.max_length, self.data.max_prompt_length + self.rollout.max_response_length)

    @property
    def accumulates(self) -> bool:
        return self.method == "iterative_dpo" if self.rounds.accumulate is None else self.rounds.accumulate

    @property
    def reference_is_sampler(self) -> bool:
        """DPO's reference is the policy that sampled the round."""
        return (self.rounds.reference or ("previous" if self.method == "rso" else "first")) == "previous"


class RejectionSamplingRecipe(LoopRecipe):
    method: Literal["rejection_sampling"]
    select: BestOf = BestOf()


class RsoRecipe(LoopRecipe):
    method: Literal["rso"]
    select: Rso = Rso()
    dpo: Dpo = Dpo()


class IterativeDpoRecipe(LoopRecipe):
    method: Literal["iterative_dpo"]
    select: PairChoice = PairChoice()
    dpo: Dpo = Dpo()


LOOP_RECIPES: tuple[type[LoopRecipe], ...] = (RejectionSamplingRecipe, RsoRecipe, IterativeDpoRecipe)
