"""What a rollout function is: how it is named, what it is given, what it may return.

    async def rollout(prompt, generate, **columns) -> dict | None

It plays the turns of one sample. `prompt` is a text, or, where the prompt was messages, a list of messages. Every other column of
the dataset arrives under its name; a function that names its columns gets only those. `generate` continues the sample:

    turn = await generate()                      # the model goes on from the prompt
    turn = await generate("= 12\\n")              # … after this text, or these chat messages, of a tool or an environment
    turn = await generate(text, max_tokens=8, stop=["\\n"])

What is returned reaches reward functions as columns, before the dataset's of the same name.

This module stays free of torch: the function's own process imports it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from conveyor.config import UserError
from conveyor.rewards import functions as rewards

GIVEN = ("prompt", "generate")
"""Arguments every call has; all others are columns of the dataset."""

MOST_OBSERVED = 2**20
"""Characters of one observation: tokenising stops the engine meanwhile."""


class EpisodeError(UserError):
    """A rollout function failed; the text names the dataset's row."""


class Turn(NamedTuple):
    """What the model said."""

    text: str
    """Special tokens skipped."""
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    """`length`: cut at max_tokens, or where the sample's tokens are used up."""


def load_rollout_function(named: str, key: str, columns: Iterable[str] | None = None) -> Callable[..., Any]:
    """Import the function named `path.py:function` or `package.module:function`; `key` is where the recipe names it.

    Args:
        columns: of the dataset, the prompt's not among them; None: not checked.

    Raises:
        UserError: it cannot be imported, is no `async def`, takes no `prompt` or no `generate` by keyword, or asks for a column
            that there is not.
    """
    function = rewards.find_function(named, key)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise UserError(f"{key}: {named} is not an async function; write it as: async def rollout(prompt, generate, **columns)")
    rewards.check_takes(function, named, key, GIVEN)
    if columns is not None:
        rewards.check_columns(function, key, columns, GIVEN)
    return function


def checked_columns(result: Any) -> dict[str, Any]:
    """What a function returned, as columns for reward functions.

    Raises:
        ValueError: neither None nor a dict of names and values that JSON can hold (no half of a surrogate pair, no more than
            `MOST_NESTING` levels), or a name that is not free.
    """
    if result is None:
        return {}
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise ValueError(f"returned a {type(result).__name__}, not a dict of columns or None")
    if taken := sorted(set(rewards.GIVEN) & set(result)):
        raise ValueError(f"returned a column {taken[0]}, which reward functions have already")
    return _plain(dict(result), "returned columns")


def checked_observation(said: Any) -> str | list[dict[str, Any]]:
    """What a tool or an environment said: a text, or chat messages (one message may come alone).

    Raises:
        TypeError: it is neither.
        ValueError: messages that JSON cannot hold, or `checked_text` refuses it.
    """
    if isinstance(said, str):
        return checked_text(said)
    messages = [said] if isinstance(said, Mapping) else said
    if not isinstance(messages, Sequence) or not all(
        isinstance(each, Mapping) and "role" in each and "content" in each for each in messages
    ):
        raise TypeError(f"generate takes a text or chat messages, each with role and content, not a {type(said).__name__}")
    plain = _plain([dict(each) for each in messages], "messages")
    checked_text(json.dumps(plain, ensure_ascii=False))
    return plain


def checked_text(text: str) -> str:
    """A text that can be tokenised while the engine waits.

    Raises:
        ValueError: longer than `MOST_OBSERVED` characters, or half of a surrogate pair is in it.
    """
    if len(text) > MOST_OBSERVED:
        raise ValueError(f"an observation of {len(text)} characters; at most {MOST_OBSERVED}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"an observation that is no text: {error}") from None
    return text


def _plain(value: Any, what: str) -> Any:
    """A copy in JSON's own types: it crosses to a process that knows nothing of the function's."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()  # half of a surrogate pair
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} that JSON cannot hold: {error}") from None
    if rewards.nests_deeper(plain):
        raise ValueError(f"{what} that are nested more than {rewards.MOST_NESTING} deep")
    return plain
