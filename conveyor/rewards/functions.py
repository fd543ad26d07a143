"""What a reward function is: how it is named, what it is given, what it may return.

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and `completions` hold one text a sample, or, where the prompt was messages, one list of
messages (the completion is then one assistant message). Every other column of the dataset arrives
under its name as a list, and `completion_ids` as lists of token ids; a column that a row lacks is
None there. The recipe's `arguments` come as they are, before a column of the same name. A score of
None = the reward does not apply to that sample. The function may be `async`. TRL's reward functions
have the same form.

A function may have an attribute `check_arguments`: called at load with the recipe's arguments, it
raises ValueError for those that are wrong.

It must judge each sample by itself: which samples share a call depends on the micro-batch.

This module stays free of torch: the function's own process imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from conveyor.config import UserError

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments every call has; all others are columns of the dataset."""

MOST_NESTING = 64
"""Levels of lists and objects in what comes from outside: what goes on with it may recur, pickle for one."""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest score: rewards are float32 from the batch on."""


def load_function(named: str, key: str, arguments: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import the function named `path.py:function` or `package.module:function`; `key` is where the recipe names it.

    Args:
        arguments: what the recipe adds to every call.

    Raises:
        UserError: see `find_function`; or it cannot be called with keywords, `prompts` and `completions` among them, or does not
            take the arguments.
    """
    function = find_function(named, key)
    check_takes(function, named, key, ("prompts", "completions"))
    _check_arguments(function, f"{key}: {named}", arguments or {})
    return function


def _check_arguments(function: Callable[..., Any], named: str, arguments: Mapping[str, Any]) -> None:
    if given := [name for name in arguments if name in GIVEN]:
        raise UserError(f"{named}: {given[0]} comes from the samples and cannot be one of the arguments")
    taken = accepted(function, arguments)
    if unknown := [name for name in arguments if name not in taken]:
        takes = ", ".join(name for name in _named(_parameters(function) or {}) if name not in GIVEN)
        raise UserError(f"{named} takes no argument {unknown[0]}; it takes {takes or 'no further ones'}")
    if (check := getattr(function, "check_arguments", None)) is not None:
        try:
            check(**arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"{named}: {error}") from None


def find_function(named: str, key: str) -> Callable[..., Any]:
    """What `path.py:function` or `package.module:function` names.

    Raises:
        UserError: no such file, module or function, an import that fails, or something that cannot be called.
    """
    where, colon, name = named.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"{key}: {named!r} is not path.py:function or package.module:function")
    module = _load_file(where, key) if where.endswith(".py") else _load_module(where, key)
    function = module
    try:
        for part in name.split("."):
            function = getattr(function, part, None)
    except UserError as error:  # a ready-made function whose package is missing
        raise UserError(f"{key}: {error}") from None
    if function is None:
        raise UserError(f"{key}: {where} has no {name}")
    if not callable(function):
        raise UserError(f"{key}: {named} is a {type(function).__name__}, not a function")
    return function


def check_takes(function: Callable[..., Any], named: str, key: str, arguments: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called with these keywords."""
    parameters = _parameters(function)
    if parameters is None:
        return
    if by_place := [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise UserError(f"{key}: {named} takes {' and '.join(by_place)} by position only (before the /); it is called with keywords")
    missing = [given for given in arguments if given not in _named(parameters) and not _takes_any(parameters)]
    if missing:
        raise UserError(f"{key}: {named} takes no argument {' nor '.join(missing)}")


def check_columns(function: Callable[..., Any], key: str, columns: Iterable[str], given: tuple[str, ...] = GIVEN) -> None:
    """Refuse a function that asks for a column the dataset does not have; what is `given` besides (the recipe's arguments, too) is none.

    Raises:
        UserError: names the missing column and those there are.
    """
    for name in lacking(function, {*columns, *given}):
        listed = ", ".join(sorted(columns)) or "no other columns"
        raise UserError(f"{key}: the function asks for the column {name}; the data has {listed}")


def lacking(function: Callable[..., Any], given: Container[str]) -> list[str]:
    """Arguments that the function cannot do without and that are not among `given`."""
    named = _named(_parameters(function) or {})
    return [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in given]


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments the function's signature has a place for: all of them, if it takes `**columns`."""
    parameters = _parameters(function)
    if parameters is None or _takes_any(parameters):
        return dict(arguments)
    named = _named(parameters)
    return {name: value for name, value in arguments.items() if name in named}


def text_of(completion: Any) -> str:
    """The completion as text: it is text where the prompt was text, and messages where that was messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class WrongCount(ValueError):
    """Not one score a sample, so no score can be told to be any sample's."""


def checked_scores(result: Any, count: int) -> list[float | None]:
    """What a function returned, as floats.

    Raises:
        WrongCount: not as many as there are samples.
        ValueError: not a list of `count` numbers, finite in float32, or None.
    """
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise ValueError(f"returned a {type(result).__name__}, not a list of numbers")
    if len(result) != count:
        raise WrongCount(f"returned {len(result)} scores for {count} samples")
    return [_score(value) for value in result]


def _score(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise ValueError(f"returned the text {value!r} as a score")
    try:
        score = float(value)
    except OverflowError:  # an int beyond float64, whose digits may fill pages
        score = math.inf if value > 0 else -math.inf
    except Exception:  # __float__ is the value's own code: PyTorch's raises RuntimeError
        raise ValueError(f"returned a {type(value).__name__} as a score") from None
    if not abs(score) <= FLOAT32_MAX:
        raise ValueError(f"returned the score {score}, not a finite float32")
    return score


def nests_deeper(value: Any, levels: int = MOST_NESTING) -> bool:
    """Whether JSON's lists and objects stand more than `levels` deep in one another."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(nests_deeper(each, levels - 1) for each in inner if isinstance(each, list | dict))


def where_raised(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (rewards.py:14)`: one line, with the innermost place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        words = str(error)
    except BaseException as second:  # __str__ is the error's own code
        words = f"(its text raises {type(second).__name__})"
    # What half of a surrogate pair is in cannot be written anywhere.
    text = " ".join(words.split()).encode(errors="backslashreplace").decode()
    return type(error).__name__ + (f": {text}" if text else "") + place


def _load_file(where: str, key: str) -> Any:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{key}: no such file {where}")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: the file may import its neighbours but hides nothing
    spec = importlib.util.spec_from_file_location(f"conveyor_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: importing {where}: {where_raised(error)}") from error
    return module


def _load_module(where: str, key: str) -> Any:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: importing {where}: {where_raised(error)}") from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        return None


def _named(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Those that a keyword of their name reaches: not `*args`, not `**columns`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
