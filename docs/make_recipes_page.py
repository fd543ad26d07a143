"""Writes docs/recipes.md from the recipe's sections: `python docs/make_recipes_page.py`. A test says when it is out of date."""

from pathlib import Path

from conveyor.config import LoopRecipe, OfflineRecipe, OnlineRecipe
from conveyor.config.describe import Key, keys
from conveyor.config.recipe import CLASS_OF, METHODS

PAGE = Path(__file__).with_name("recipes.md")
HEAD = """# Every key of a recipe

A recipe is a YAML file. Its `method` says which keys it may have; a dotted name is a key inside a section, and each can be
set on the command line as well: `conveyor train RECIPE.yaml --train.learning_rate 1e-5`. `rewards` is a list: `rewards.0.weight` is
the weight of the first. An unknown key or a wrong value is one line and exit status 2. `conveyor train --help RECIPE.yaml` prints
the keys of the recipe's method.

*Online* methods sample and train in one pipeline ([methods.md](methods.md)), *offline* ones learn from a fixed dataset
([offline.md](offline.md)), *loops* sample, select and fit in rounds ([loops.md](loops.md)).

This page is made by `docs/make_recipes_page.py`.
"""

GROUPS: dict[str, type] = {"online": OnlineRecipe, "offline": OfflineRecipe, "loops": LoopRecipe}
OF_PAGES = "one of methods.md, offline.md, loops.md"


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
    words: list[str] = []
    left = list(methods)
    for group, kind in GROUPS.items():
        members = [method for method in METHODS if issubclass(CLASS_OF[method], kind)]
        if set(members) <= set(left):
            words.append(group)
            left = [method for method in left if method not in members]
    return ", ".join([*words, *left])


def _line(name: str, by_method: dict[str, Key]) -> str:
    # The method's own names stand in its type.
    types = OF_PAGES if name == "method" else " | ".join(dict.fromkeys(key.type for key in by_method.values()))
    default = "<br>".join(f"`{value}`{told}" for value, told in _by_value({method: key.default for method, key in by_method.items()}))
    helps: dict[str, list[str]] = {}
    for method, key in by_method.items():
        helps.setdefault(key.help, []).append(method)
    meaning = "<br>".join(text + ("" if len(methods) == len(METHODS) else f" *({_named(methods)})*") for text, methods in helps.items())
    cells = [f"`{name}`", types, default, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _by_value(values: dict[str, str]) -> list[tuple[str, str]]:
    """Every value, the usual one first, and after the others whose they are."""
    methods: dict[str, list[str]] = {}
    for method, value in values.items():
        methods.setdefault(value, []).append(method)
    usual = max(methods, key=lambda value: len(methods[value]))
    return [(usual, ""), *((value, f" ({_named(its)})") for value, its in methods.items() if value != usual)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
