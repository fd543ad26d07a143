"""From a recipe file and `--dotted.key value` pairs to a checked recipe, or one clear line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from conveyor.config.offline_rules import broken_offline_rules
from conveyor.config.presets import DEFAULTS
from conveyor.config.recipe import CLASS_OF, METHODS, OnlineRecipe, Recipe
from conveyor.config.rules import broken_rules
from conveyor.errors import UserError


class _OnceLoader(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys; here that is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_recipe(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """Read a YAML recipe, lay the overrides over it, check it.

    Raises:
        UserError: the file is missing or no YAML mapping, a key is unknown, a value has the wrong
            type or range, or two sections contradict each other.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such recipe file")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys, this is {'empty' if raw is None else 'not one'}")
    for key, value in (overrides or {}).items():
        set_key(raw, key, value)
    return parse_recipe(raw, source=str(path))


def parse_recipe(raw: dict[str, Any], source: str = "recipe", *, trains: bool = True) -> Recipe:
    """Check a recipe given as a plain mapping (see `load_recipe`). `trains`: False where nothing is trained, only sampled and scored."""
    method = raw.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"{source}: method: {'missing' if method is None else repr(method)}; one of {', '.join(METHODS)}")
    try:
        recipe: Recipe = CLASS_OF[method].model_validate(_merge(DEFAULTS.get(method, {}), raw))
    except ValidationError as error:
        raise UserError(f"{source}: {_one_line(error, method)}") from None
    for key, reason in broken_rules(recipe, trains) if isinstance(recipe, OnlineRecipe) else broken_offline_rules(recipe):
        raise UserError(f"{source}: {key}: {reason}")
    return recipe


def _one_line(error: ValidationError, method: str) -> str:
    first, more = error.errors()[0], error.error_count() - 1
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key" + _nearest(key, method)
    elif first["type"] == "missing":
        message = "missing"
    elif first["type"] != "value_error":
        message = f"{message} (got {first['input']!r})"
    return (f"{key}: " if key else "") + message + (f" (and {more} more)" if more else "")


def _nearest(key: str, method: str) -> str:
    """`; do you mean train.steps?`, where a known key is spelt much like it, or has its name in another section."""
    from conveyor.config.describe import keys

    given, names = re.sub(r"\.\d+(?=\.)", ".0", key), [known.name for known in keys(method)]
    known = [*names, *dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)]
    last = given.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.8) or elsewhere[:1] or difflib.get_close_matches(given, known, n=1)
    return f"; do you mean {close[0]}?" if close else ""


def set_key(raw: dict[str, Any], dotted: str, text: str) -> None:
    """Lay `--dotted.key text` over a recipe as it was read.

    Raises:
        UserError: the key leads through something that is no section.
    """
    *parents, last = dotted.split(".")
    place: Any = raw
    for depth, name in enumerate(parents):
        if isinstance(place, list) and name.isdigit() and int(name) < len(place):
            place = place[int(name)]
            continue
        if isinstance(place, list):
            raise UserError(f"--{dotted}: {'.'.join(parents[:depth])} has {len(place)} entries, from 0 to {len(place) - 1}")
        if not isinstance(place, dict):
            raise UserError(f"--{dotted}: {'.'.join(parents[:depth])} is not a section")
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
    try:
        value = yaml.safe_load(text) if text.strip() else text
    except yaml.YAMLError:
        value = text
    if isinstance(place, list) and last.isdigit() and int(last) < len(place):
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise UserError(f"--{dotted}: {'.'.join(parents)} is not a section")


def _merge(defaults: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
