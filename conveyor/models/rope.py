"""Rotary positions beyond those a model was trained on: `model.rope_scaling` laid over the model's own, for transformers and vLLM alike.

YaRN (Peng et al. 2023, arXiv 2309.00071) and the others are those of transformers (`modeling_rope_utils`), which has the formulas.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conveyor.errors import UserError

if TYPE_CHECKING:
    from conveyor.config import sections


def rope_parameters(model: sections.Model) -> dict[str, Any] | None:
    """The whole rotary settings of a recipe's model, as its configuration is to have them; None where the recipe says nothing of them.

    Raises:
        UserError: they are not what transformers takes.
    """
    if model.rope_scaling is None:
        return None
    try:
        config = AutoConfig.from_pretrained(model.path).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: no model configuration can be read from {model.path}: {str(error).splitlines()[0]}") from None
    return _laid_over(config, model.rope_scaling)


def longest_positions(config: PretrainedConfig, scaling: dict[str, Any] | None) -> int | None:
    """Tokens that a model takes: those of its configuration, or as many times more as a scaling says; None: it has no limit."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    if own is None:
        return None
    found = (getattr(config, "rope_parameters", None) or {}) if scaling is None else _laid_over(config, scaling)
    kinds = [kind for kind in found.values() if isinstance(kind, dict)] or [found]
    trained = 0 if scaling is None else own  # of a model's own scaling, only what says of how many tokens
    return max(own, *(int((kind.get("factor") or 1.0) * kind.get("original_max_position_embeddings", trained)) for kind in kinds))


def _laid_over(config: PretrainedConfig, scaling: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    own = dict(getattr(config, "rope_parameters", None) or {})
    kinds = [name for name, value in own.items() if isinstance(value, dict)]
    if not own:
        raise UserError(f"model.rope_scaling: {config.model_type} models have no rotary positions")
    if kinds and not scaling.keys() <= set(kinds):
        raise UserError(f"model.rope_scaling: this model has several kinds of layers; give it by kind: {', '.join(kinds)}")
    if kinds:
        config.rope_parameters = own | {kind: _clean(own[kind]) | scaling[kind] for kind in scaling}
    else:
        config.rope_parameters = _clean(own) | scaling
    found: dict[str, Any] = config.rope_parameters
    for kind in kinds or [None]:
        _check(config, kind, found[kind] if kind else found)
    return found


def _clean(own: dict[str, Any]) -> dict[str, Any]:
    """What stays of a model's own settings, whatever the new ones are."""
    return {key: value for key, value in own.items() if key in ("rope_theta", "partial_rotary_factor")}


def _check(config: PretrainedConfig, kind: str | None, parameters: dict[str, Any]) -> None:
    """They are complete, and frequencies follow from them."""
    name = parameters.get("rope_type", parameters.get("type"))
    if name not in (*ROPE_INIT_FUNCTIONS, "default"):
        raise UserError(f"model.rope_scaling: rope_type {name!r}: one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    try:
        config.standardize_rope_params()
        if name != "default":
            ROPE_INIT_FUNCTIONS[name](config, "cpu", layer_type=kind)
    except KeyError as error:
        raise UserError(f"model.rope_scaling: {name} needs {error.args[0]}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"model.rope_scaling: {str(error).splitlines()[0]}") from None
