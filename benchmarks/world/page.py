"""The table and the picture of docs/world.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.world.run import Run

BEGIN, END = "<!-- world: written by make world -->", "<!-- end of world -->"


def methods_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.method for run in runs))


def of(runs: Sequence[Run], method: str) -> list[Run]:
    return sorted((run for run in runs if run.method == method), key=lambda run: run.seed)


def markdown(runs: Sequence[Run]) -> str:
    """One line a method: means over the seeds, and each seed's true reward."""
    lines = [
        "| method | true reward, by seed | mean | exactly right | KL, nats an answer | trained tokens | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in methods_of(runs):
        some = of(runs, method)
        by_seed = " · ".join(f"{run.measured.true_reward:.3f}" for run in some)
        mean = {name: statistics.fmean(getattr(run.measured, name) for run in some) for name in ("true_reward", "exact", "kl")}
        tokens = statistics.fmean(run.trained_tokens for run in some)
        seconds = statistics.fmean(run.seconds for run in some)
        name = "*before*" if method == "start" else f"`{method}`"
        lines.append(f"| {name} | {by_seed} | {mean['true_reward']:.3f} | {mean['exact']:.3f} | {mean['kl']:.2f} | "
                     f"{tokens:,.0f} | {seconds:.0f} |")  # fmt: skip
    return "\n".join([*lines, "", *claims(runs), "", "![true reward over KL, a mark a method and seed](world.png)"])


CLAIMS = [
    ("offline DPO suffers from the shift between data and policy", "iterative_dpo", "dpo"),
    ("statistical rejection sampling gives DPO better pairs", "rso", "dpo"),
    ("unpaired labels are as good as pairs", "kto", "dpo"),
    ("rounds of rejection sampling do better than one fit to the better samples", "rejection_sampling", "sft"),
    ("rounds of DPO catch up with PPO", "iterative_dpo", "ppo"),
    ("rounds of rejection sampling catch up with PPO", "rejection_sampling", "ppo"),
]
"""What the field says, and the two methods whose true rewards are compared."""


def claims(runs: Sequence[Run]) -> list[str]:
    """The difference of each claim's methods, on the same seed, whichever way it goes; the error is that of measuring a difference."""
    lines = ["| claim | compared | difference in true reward, by seed | mean | error of one |", "|---|---|---|---|---|"]
    for claim, one, other in CLAIMS:
        pairs = list(zip(of(runs, one), of(runs, other), strict=True))
        differences = [left.measured.true_reward - right.measured.true_reward for left, right in pairs]
        error = statistics.fmean((left.measured.error**2 + right.measured.error**2) ** 0.5 for left, right in pairs)
        by_seed = " · ".join(f"{difference:+.3f}" for difference in differences)
        lines.append(f"| {claim} | `{one}` − `{other}` | {by_seed} | {statistics.fmean(differences):+.3f} | {error:.3f} |")
    return lines


def draw(runs: Sequence[Run], file: Path) -> None:
    """True reward over KL: small marks are seeds, large ones their means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6), layout="constrained")
    for place, method in enumerate(methods_of(runs)):
        some, color = of(runs, method), "black" if method == "start" else f"C{place - 1}"
        points = [(run.measured.kl, run.measured.true_reward) for run in some]
        axes.scatter([kl for kl, _ in points], [reward for _, reward in points], color=color, s=16, alpha=0.55)
        x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
        axes.scatter([x], [y], color=color, s=80, label="SFT policy, before" if method == "start" else method)
    axes.set(xlabel="KL(π ‖ SFT policy) of an answer, nats", ylabel="true reward of answers to held-out prompts")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
