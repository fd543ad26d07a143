"""Writes docs/recipes.md from the recipe's sections: `python docs/make_recipes_page.py`. A test says when it is out of date."""

from pathlib import Path
from typing import get_args

from conveyor.config.describe import Key, keys
from conveyor.config.recipe import METHODS, OfflineMethod, OnlineMethod

PAGE = Path(__file__).with_name("recipes.md")
HEAD = """# Every key of a recipe

A recipe is a YAML file. Its `method` says which keys it may have; a dotted name is a key inside a section, and each can be
set on the command line as well: `conveyor train RECIPE.yaml --train.learning_rate 1e-5`. `rewards` is a list: `rewards.0.weight` is
the weight of the first. An unknown key or a wrong value is one line and exit status 2. `conveyor train --help RECIPE.yaml` prints
the keys of the recipe's method.

This page is made by `docs/make_recipes_page.py`.
"""


def page() -> str:
    """The whole page as Markdown."""
    by_method = {method: {key.name: key for key in keys(method)} for method in METHODS}
    names = list(dict.fromkeys(name for listed in by_method.values() for name in listed))
    tables: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: "." in name):
        section = name.split(".")[0] if "." in name else "The recipe itself"
        tables.setdefault(section, []).append(_line(name, {method: listed[name] for method, listed in by_method.items() if name in listed}))
    parts = [HEAD]
    for section, lines in tables.items():
        title = section if " " in section else f"`{section}`"
        parts.append(f"## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _named(methods: list[str]) -> str:
    """The methods, in as few words as can be."""
    online, offline = get_args(OnlineMethod), get_args(OfflineMethod)
    if set(methods) == set(online):
        return "methods that sample"
    if set(methods) == set(offline):
        return "offline methods"
    return ", ".join(methods)


def _line(name: str, by_method: dict[str, Key]) -> str:
    key = next(iter(by_method.values()))
    only = "" if len(by_method) == len(METHODS) else f" *({_named(list(by_method))})*"
    defaults: dict[str, list[str]] = {}
    for method, its in by_method.items():
        defaults.setdefault(its.default, []).append(method)
    usual = max(defaults, key=lambda value: len(defaults[value]))
    others = [f"`{value}` ({', '.join(methods)})" for value, methods in defaults.items() if value != usual]
    told = [f"`{usual}`", *others]
    # The method's own names stand in its type.
    types = "one of docs/methods.md" if name == "method" else " | ".join(dict.fromkeys(its.type for its in by_method.values()))
    cells = [f"`{name}`", types, "<br>".join(told), key.help + only]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
