"""`conveyor COMMAND`: the command line. Bad input is one line and exit status 2."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from conveyor.config import LoopRecipe, OnlineRecipe, Recipe, RunError, UserError, load_recipe

# Read when torch is loaded. OpenMP threads that spin while they wait slow each other down many times over as soon as
# another process wants their core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A hub that cannot be reached is one line of ours, not twenty about tries.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")


MORE = {
    "evaluate": ("conveyor.pipeline.evaluate", "sample held-out prompts from a model and judge the answers: rewards, pass@k"),
    "generate": ("conveyor.pipeline.generate", "sample a dataset's prompts: a file of completions, with log-probs and rewards if wanted"),
    "merge-adapter": ("conveyor.models.merge_adapter", "merge an adapter that was trained (LoRA, QLoRA, DoRA) into its base"),
    "parity": ("conveyor.pipeline.parity", "run a recipe with overlap off and on and print the largest differences"),
    "plan": ("conveyor.plan.command", "predict step times and search a placement, from a run's events or from hardware"),
    "report": ("conveyor.report.command", "where a run's time went, and its timeline as a picture"),
    "score": ("conveyor.pipeline.score_rows", "give the prompts and completions of a dataset to reward functions and models"),
    "serve-reward": ("conveyor.rewards.serve", "answer with a reward model or function over HTTP, for recipes that name its url"),
}
"""Command → (module with `add_arguments` and `run`, help)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(next((word for word in arguments if not word.startswith("-")), None))
    known, rest = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("conveyor").setLevel(logging.INFO)
    try:
        with _ending_in_order():
            return int(known.run(known, rest))
    except UserError as error:
        print(f"conveyor: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"conveyor: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != signal.SIGTERM:  # which is how Ray's own handler of that signal ends
            raise
        print("conveyor: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """A request to end, as schedulers and containers send it, is like Ctrl-C: workers are ended, and a Ray that was started here."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Only the command asked for is imported."""
    parser = argparse.ArgumentParser(prog="conveyor", description="RLHF whose stages work at the same time.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    quickstart = commands.add_parser("quickstart", help="build a tiny model and make it better by RLHF, in minutes on two cores")
    quickstart.add_argument("--output-dir", default="runs/quickstart", help="default: %(default)s")
    quickstart.set_defaults(run=_quickstart)
    train = commands.add_parser("train", help="train by a recipe (--help RECIPE lists every key)", add_help=False)
    train.add_argument("recipe", nargs="?", help="YAML file")
    train.add_argument("-h", "--help", action="store_true")
    train.set_defaults(run=_train)
    check = commands.add_parser(
        "check",
        help="check a recipe, its files, rows and devices without training",
        usage="conveyor check RECIPE.yaml [--cluster NODESxGPUS[:GIB]] [--dotted.key value ...]",
    )
    check.add_argument("recipe", help="YAML file")
    check.add_argument(
        "--cluster", metavar="NODESxGPUS[:GIB]",
        help="check devices, placement and memory for such a cluster, e.g. 4x8 (GPUs of 80 GiB) or 2x8:141, instead of files and rows; "
        "ray: for the one at ray.address",
    )  # fmt: skip
    check.add_argument("--model", metavar="SIZE", help="with --cluster: shape of a policy that is not known, e.g. 8b or a folder")
    check.add_argument("--reward-model", metavar="SIZE", help="with --cluster: the same of reward models and critic")
    check.set_defaults(run=_check)
    for name, (module, about) in MORE.items():
        more = commands.add_parser(name, help=about)
        if name == command:
            importlib.import_module(module).add_arguments(more)
        more.set_defaults(run=_more, module=module)
    return parser


def _quickstart(known: argparse.Namespace, rest: list[str]) -> int:
    _overrides(rest, allowed=False)
    from conveyor.quickstart.run import quickstart

    return quickstart(known.output_dir)


def _train(known: argparse.Namespace, rest: list[str]) -> int:
    if known.help:
        return _help(known.recipe)
    if known.recipe is None:
        raise UserError("train: name a recipe, e.g. recipes/tiny/ppo.yaml")
    recipe = _load(known, rest)
    if isinstance(recipe, OnlineRecipe):
        from conveyor.pipeline.loop import run_online

        run_online(recipe)
    elif isinstance(recipe, LoopRecipe):
        from conveyor.loops.run import run_loop

        run_loop(recipe)
    else:
        from conveyor.offline.run import run_offline

        run_offline(recipe)
    print(f"{recipe.output_dir}/model")
    return 0


def _help(path: str | None) -> int:
    """What train takes; with a recipe, every key its method knows."""
    print("usage: conveyor train RECIPE.yaml [--dotted.key value ...]\n")
    if path is None:
        print("conveyor train --help RECIPE.yaml lists every key of the recipe's method.")
        return 0
    from conveyor.config.describe import keys

    for key in keys(load_recipe(path).method):
        print(
            f"--{key.name}  ({key.type}; default {key.default})\n    {key.help}"
            if key.help
            else f"--{key.name}  ({key.type}; default {key.default})"
        )
    return 0


def _check(known: argparse.Namespace, rest: list[str]) -> int:
    recipe = _load(known, rest)
    if known.cluster is not None:
        from conveyor.cluster_check import Named, check_on, named_cluster

        fits = check_on(recipe, named_cluster(known.cluster, recipe.ray), Named(known.model, known.reward_model))
        print(f"{known.recipe}: {recipe.method}, fits")
        print(fits)
        return 0
    if known.model is not None or known.reward_model is not None:
        raise UserError("check: --model and --reward-model go with --cluster")
    if isinstance(recipe, OnlineRecipe):
        from conveyor.checks import check_online

        order = check_online(recipe)
        print(f"{known.recipe}: {recipe.method}, {len(order)} steps: sound")
    elif isinstance(recipe, LoopRecipe):
        from conveyor.loops.run import check_loop

        check_loop(recipe)
        print(f"{known.recipe}: {recipe.method}, {recipe.rounds.count} rounds: sound")
    else:
        from conveyor.offline.run import check_offline

        check_offline(recipe)
        print(f"{known.recipe}: {recipe.method}: sound")
    return 0


def _more(known: argparse.Namespace, rest: list[str]) -> int:
    return int(importlib.import_module(known.module).run(known, _overrides(rest)))


def _load(known: argparse.Namespace, rest: list[str]) -> Recipe:
    return load_recipe(known.recipe, _overrides(rest))


def _overrides(rest: list[str], allowed: bool = True) -> dict[str, str]:
    """`--dotted.key value` and `--dotted.key=value` pairs."""
    found: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        if not allowed or not word.startswith("--"):
            raise UserError(f"{word}: unknown argument")
        key, equals, value = word[2:].partition("=")
        if not key:
            raise UserError(f"{word}: names no key")
        if not equals:
            following = next(words, None)
            if following is None:
                raise UserError(f"--{key}: needs a value")
            value = following
        found[key] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
