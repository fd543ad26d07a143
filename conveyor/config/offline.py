"""Recipes of the methods that learn from a fixed dataset: what each has beside the common sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conveyor.config.common import Common
from conveyor.config.sections import Flag, Model, Number, PositiveFloat, Section, Whole

PairLoss = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "simpo", "orpo", "cpo", "slic",
]  # fmt: skip
REFERENCE_FREE = ("simpo", "orpo", "cpo", "slic")
"""Losses of pairs that ask no reference."""
Half = Annotated[Number, Field(ge=0, lt=0.5)]


class RewardModelling(Section):
    label_smoothing: Half = Field(0.0, description="chance that a pair is labelled the wrong way round")
    centre_coef: Number = Field(0.0, ge=0, description="weight of (r_chosen + r_rejected)², which keeps scores near 0")


class Dpo(Section):
    loss: PairLoss = Field("sigmoid", description="loss of a pair; docs/offline.md has the formulas")
    beta: PositiveFloat | None = Field(None, description="β of the loss; default: 0.1, of simpo 2.0")
    label_smoothing: Half | None = Field(
        None, description="chance that a pair is the wrong way round (sigmoid: cDPO); default: 0, of robust 0.1, of exo_pair 0.001"
    )
    margin: Number | None = Field(None, description="γ of simpo, δ of slic; default: 1.0")
    length_normalize: Flag | None = Field(
        None, description="divide log-probs by the completion's tokens; default: on for ipo, simpo and orpo, else off"
    )
    nll_coef: Number | None = Field(
        None, ge=0, description="weight of the mean −log p over the chosen completions' tokens; default: 1 for orpo, cpo and slic, else 0"
    )
    discopop_tau: PositiveFloat = Field(0.05, description="temperature of discopop's blend")

    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE

    @property
    def beta_used(self) -> float:
        return self.beta if self.beta is not None else 2.0 if self.loss == "simpo" else 0.1

    @property
    def smoothing_used(self) -> float:
        return self.label_smoothing if self.label_smoothing is not None else {"robust": 0.1, "exo_pair": 0.001}.get(self.loss, 0.0)

    @property
    def margin_used(self) -> float:
        return 1.0 if self.margin is None else self.margin

    @property
    def normalizes(self) -> bool:
        return self.loss in ("ipo", "simpo", "orpo") if self.length_normalize is None else self.length_normalize

    @property
    def nll_used(self) -> float:
        return self.nll_coef if self.nll_coef is not None else float(self.loss in ("orpo", "cpo", "slic"))


class Kto(Section):
    loss: Literal["kto", "apo_zero_unpaired"] = Field("kto", description="loss of a completion; docs/offline.md has the formulas")
    beta: PositiveFloat = Field(0.1, description="β of the loss")
    desirable_weight: PositiveFloat = Field(1.0, description="weight of completions labelled true")
    undesirable_weight: PositiveFloat = Field(1.0, description="weight of those labelled false")


class Bco(Section):
    beta: PositiveFloat = Field(0.1, description="β of the implicit reward β·log π/π_ref")
    desirable_weight: PositiveFloat = Field(1.0, description="weight of completions labelled true")
    undesirable_weight: PositiveFloat = Field(1.0, description="weight of those labelled false")


def spelled(value: float, decimals: int) -> str:
    """A normalised score as prompts have it; minus zero is zero."""
    written = f"{value:.{decimals}f}"
    return written if float(written) else f"{0.0:.{decimals}f}"


class ConditionClass(Section):
    text: str = Field(description="what the prompt says of such a row")
    weight: PositiveFloat = Field(1.0, description="weight of its loss")


class Condition(Section):
    kind: Literal["score", "class"] = Field("score", description="condition on the row's reward, or on the class of its source")
    template: str = Field("{prompt} [{condition}]", description="the prompt with its condition; holds {prompt} and {condition}")
    target: str | float | None = Field(
        None, description="the condition of inference: a normalised score (default 1.0), or a class (default: the one of largest weight)"
    )
    classes: dict[str, ConditionClass] = Field({}, description="kind class: name → text and weight")
    decimals: Whole = Field(1, ge=0, le=6, description="kind score: digits after the point")
    mean: Number | None = Field(None, description="kind score: taken from rewards; default: the dataset's mean")
    std: PositiveFloat | None = Field(None, description="kind score: rewards are divided by it; default: the dataset's deviation")

    @property
    def target_text(self) -> str:
        """What stands for {condition} at inference."""
        if self.kind == "score":
            return spelled(1.0 if self.target is None else float(self.target), self.decimals)
        return self.classes[self.target_class].text

    @property
    def target_class(self) -> str:
        """Kind class: the name of the one that is asked for. A number in a recipe may be a name: 1 is `1`."""
        if self.target is None:
            return max(self.classes, key=lambda name: self.classes[name].weight)
        return self.target if isinstance(self.target, str) else f"{self.target:g}"


class OfflineRecipe(Common):
    """Methods that learn from a fixed dataset."""

    method: str


class SftRecipe(OfflineRecipe):
    method: Literal["sft"]


class ConditionalSftRecipe(OfflineRecipe):
    method: Literal["conditional_sft"]
    condition: Condition = Condition()


class RewardModelRecipe(OfflineRecipe):
    method: Literal["reward_model"]
    reward_model: RewardModelling = RewardModelling()


class ProcessRewardModelRecipe(OfflineRecipe):
    method: Literal["process_reward_model"]


class ReferencedRecipe(OfflineRecipe):
    """Methods whose loss compares with a reference."""

    reference: Model | None = Field(None, description="default: model as it is before training")
    reference_cache: str | None = Field(
        None, description="folder where the reference's log-probs are kept, for runs to share; default: reference_logprobs/ in output_dir"
    )


class DpoRecipe(ReferencedRecipe):
    method: Literal["dpo"]
    dpo: Dpo = Dpo()


class KtoRecipe(ReferencedRecipe):
    method: Literal["kto"]
    kto: Kto = Kto()

    @property
    def updated_rows(self) -> int:
        """Rows of an update."""
        return self.train.train_batch_size or self.train.micro_batch_size


class BcoRecipe(ReferencedRecipe):
    method: Literal["bco"]
    bco: Bco = Bco()


OFFLINE_RECIPES: tuple[type[OfflineRecipe], ...] = (
    SftRecipe, ConditionalSftRecipe, RewardModelRecipe, ProcessRewardModelRecipe, DpoRecipe, KtoRecipe, BcoRecipe,
)  # fmt: skip
