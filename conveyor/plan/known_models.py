"""Shapes of published models, by size and by the names of their repositories, as their public configurations say: so that a plan needs
no download."""

from __future__ import annotations

import json
from pathlib import Path

from conveyor.config import UserError
from conveyor.plan.models import Experts, ModelShape, shape_from_config

NAMED = {
    "1b": ModelShape(16, 2048, 32, 8, 64, 8192, 128_256, tied=True),  # Llama 3.2
    "3b": ModelShape(28, 3072, 24, 8, 128, 8192, 128_256, tied=True),  # Llama 3.2
    "7b": ModelShape(32, 4096, 32, 32, 128, 11_008, 32_000),  # Llama 2
    "8b": ModelShape(32, 4096, 32, 8, 128, 14_336, 128_256),  # Llama 3
    "13b": ModelShape(40, 5120, 40, 40, 128, 13_824, 32_000),  # Llama 2
    "30b-a3b": ModelShape(48, 2048, 32, 4, 128, 6144, 151_936, qk_norm=True, experts=Experts(128, 8, 768)),  # Qwen 3
    "32b": ModelShape(64, 5120, 40, 8, 128, 27_648, 152_064, qkv_bias=True),  # Qwen 2.5
    "70b": ModelShape(80, 8192, 64, 8, 128, 28_672, 128_256),  # Llama 3
    "405b": ModelShape(126, 16_384, 128, 8, 128, 53_248, 128_256),  # Llama 3.1
}
"""Size → model."""

_FAMILIES: dict[str, ModelShape] = {
    "qwen2.5-0.5b": ModelShape(24, 896, 14, 2, 64, 4864, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": ModelShape(28, 1536, 12, 2, 128, 8960, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-3b": ModelShape(36, 2048, 16, 2, 128, 11_008, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 128, 18_944, 152_064, qkv_bias=True),
    "qwen2.5-14b": ModelShape(48, 5120, 40, 8, 128, 13_824, 152_064, qkv_bias=True),
    "qwen2.5-32b": NAMED["32b"],
    "qwen2.5-72b": ModelShape(80, 8192, 64, 8, 128, 29_568, 152_064, qkv_bias=True),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936, tied=True, qk_norm=True),
    "qwen3-1.7b": ModelShape(28, 2048, 16, 8, 128, 6144, 151_936, tied=True, qk_norm=True),
    "qwen3-4b": ModelShape(36, 2560, 32, 8, 128, 9728, 151_936, tied=True, qk_norm=True),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12_288, 151_936, qk_norm=True),
    "qwen3-14b": ModelShape(40, 5120, 40, 8, 128, 17_408, 151_936, qk_norm=True),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25_600, 151_936, qk_norm=True),
    "qwen3-30b-a3b": NAMED["30b-a3b"],
    "qwen3-235b-a22b": ModelShape(94, 4096, 64, 4, 128, 12_288, 151_936, qk_norm=True, experts=Experts(128, 8, 1536)),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 14_336, 32_000, experts=Experts(8, 2, 14_336)),
    "mixtral-8x22b": ModelShape(56, 6144, 48, 8, 128, 16_384, 32_768, experts=Experts(8, 2, 16_384)),
    "mistral-7b": ModelShape(32, 4096, 32, 8, 128, 14_336, 32_768),  # v0.3; v0.1 and v0.2 have a vocabulary of 32,000
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49_152, tied=True),
    "llama-3-8b": NAMED["8b"],
    "llama-3-70b": NAMED["70b"],
    "llama-3.1-8b": NAMED["8b"],
    "llama-3.1-70b": NAMED["70b"],
    "llama-3.1-405b": NAMED["405b"],
    "llama-3.2-1b": NAMED["1b"],
    "llama-3.2-3b": NAMED["3b"],
    "llama-3.3-70b": NAMED["70b"],
}
"""Beginning of a repository's name, without `meta-` → model; what follows it says how the model was trained further."""

PUBLISHERS = ("meta-llama", "qwen", "mistralai", "huggingfacetb")
"""Whose repositories have these names; anybody else's may hold anything."""
OTHERS = {
    "sfairXC/FsfairX-LLaMA3-RM-v0.1": NAMED["8b"],
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": NAMED["8b"],
    "allenai/Llama-3.1-70B-Instruct-RM-RB2": NAMED["70b"],
}
"""Reward models made from one of these."""


def known_shape(name: str) -> ModelShape | None:
    """Of a size, such as `70b`, or a hub id; None: not known here."""
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    if name in OTHERS:
        return OTHERS[name]
    publisher, _, repository = name.lower().partition("/")
    if publisher not in PUBLISHERS:
        return None
    repository = repository.removeprefix("meta-")
    found = [family for family in _FAMILIES if repository == family or repository.startswith(family + "-")]
    return _FAMILIES[max(found, key=len)] if found else None


def model_shape(name: str, flag: str = "--model") -> ModelShape:
    """The shape of a named model, of a hub id that is known here, or of a folder that holds a Hugging Face config.json.

    Args:
        flag: where it was named.

    Raises:
        UserError: none of these, or a model of another kind.
    """
    if (known := known_shape(name)) is not None:
        return known
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        raise UserError(
            f"{flag}: the shape of {name!r} is not known: it is neither a folder with a config.json nor one of {', '.join(NAMED)}, nor a "
            "published model that comes along in conveyor/plan/known_models.py"
        )
    try:
        return shape_from_config(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag}: {path}: no shape can be read from it ({error!r})") from None
