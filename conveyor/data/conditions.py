"""The condition a model samples under: what `conditional_sft` has written around the prompts of the samples it learnt as good ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, overload

from conveyor.config import UserError
from conveyor.data.tokenizer import Messages

PLACE = "{prompt}"
FILE = "condition.json"


@overload
def apply_template(template: str, prompt: str) -> str: ...


@overload
def apply_template(template: str, prompt: Messages) -> list[dict[str, Any]]: ...


def apply_template(template: str, prompt: str | Messages) -> str | list[dict[str, Any]]:
    """The prompt with its text, or that of its last user message, put in the place of `{prompt}`.

    Example: `apply_template("Good: {prompt}", "2+2=")` is `Good: 2+2=`

    Raises:
        ValueError: the template has no `{prompt}`, or the messages no user's.
    """
    if PLACE not in template:
        raise ValueError(f"the template has no {PLACE}")
    if isinstance(prompt, str):
        return template.replace(PLACE, prompt)
    messages = [dict(message) for message in prompt]
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None:
        raise ValueError("there is no user message to write the condition into")
    last["content"] = template.replace(PLACE, last["content"])
    return messages


def read_template(model: Path | str, condition: str | None = None) -> str | None:
    """`prompt_template` of the model folder's condition.json; None: the model has no condition.

    Args:
        condition: text that stands in the place of the target's.

    Raises:
        UserError: the file is not what it should be, or not there though a condition is given.
    """
    file = Path(model).expanduser() / FILE
    if not file.is_file():
        if condition is not None:
            raise UserError(f"--condition: {model} has no {FILE}; only models of conditional_sft take one")
        return None
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        template = told["prompt_template"] if condition is None else told["condition"]["template"].replace("{condition}", condition)
    except (OSError, ValueError, KeyError, TypeError):
        template = None
    if not isinstance(template, str) or template.count(PLACE) != 1 or "{condition}" in template:
        raise UserError(f"{file}: needs prompt_template, a text that holds {PLACE} once; --no-condition does without it")
    return template
