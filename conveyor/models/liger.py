"""Liger's fused kernels (Hsu et al. 2024, arXiv 2410.10989) in a model that is loaded: RMSNorm, rotary positions, gated MLPs.

Its fused output layer is left out: log-probs of chosen tokens, their entropies and temperatures are `language_model.TokenHead`'s.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from conveyor.errors import UserError


def check_liger(wanted: bool | None) -> None:
    """Raises:
    UserError: it is asked for and not installed.
    """
    if wanted and find_spec("liger_kernel") is None:
        raise UserError("model.liger: the package liger-kernel is not installed")


def apply_liger(model: PreTrainedModel, wanted: bool | None) -> bool:
    """Give a model the kernels there are for it; whether it has them now.

    Args:
        wanted: None: where a GPU and the package are there, and it knows the model.

    Raises:
        UserError: they are asked for, and the package is not installed or does not know the model.
    """
    check_liger(wanted)
    if wanted is False or (wanted is None and not (torch.cuda.is_available() and find_spec("liger_kernel"))):
        return False
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    known = model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN
    if wanted and not known:
        raise UserError(f"model.liger: liger-kernel has nothing for {model.config.model_type} models; leave it out")
    if known:
        _apply_liger_kernel_to_instance(
            model=model, rope=True, rms_norm=True, swiglu=True, geglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
    return known
