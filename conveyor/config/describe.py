"""Every key of a method, with its type, default and meaning: what `conveyor train --help RECIPE` prints."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from conveyor.config.presets import DEFAULTS
from conveyor.config.recipe import CLASS_OF


@dataclass(frozen=True, slots=True)
class Key:
    """One settable key."""

    name: str
    """Dotted, as on the command line."""
    type: str
    default: str
    help: str


def keys(method: str) -> list[Key]:
    """All keys a recipe of this method may have, in the order of the sections."""
    return list(_walk(CLASS_OF[method], "", DEFAULTS.get(method, {})))


def _walk(model: type[BaseModel], prefix: str, defaults: dict[str, Any], optional: bool = False) -> Iterator[Key]:
    """optional: the section may be left out."""
    for name, field in model.model_fields.items():
        key, inner = f"{prefix}{name}", _section(field.annotation)
        over = defaults.get(name, PydanticUndefined)
        if inner is None:
            default = _default(field, over)
            told = f"{default} in this section, which may be left out" if optional and default == "required" else default
            yield Key(key, _type(field.annotation), told, field.description or "")
        elif get_origin(field.annotation) is tuple:
            yield from _walk(inner, f"{key}.0.", {})
        else:
            yield from _walk(inner, f"{key}.", over if isinstance(over, dict) else {}, optional or field.default is None)


def _section(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _default(field: FieldInfo, over: Any) -> str:
    value = field.default if over is PydanticUndefined else over
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value).replace("\n", "\\n")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(_type(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return "list"
    return "null" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))
