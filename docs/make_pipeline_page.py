"""Draws the pictures of docs/pipeline.md and writes its tables, all from the simulator: `PYTHONPATH=. python docs/make_pipeline_page.py`.

Tables stand between markers, `<!-- NAME -->` and `<!-- end NAME -->`; the text around them is written by hand. The pictures and the
tables of formulas take seconds, the predictions some minutes: `… make_pipeline_page.py schedules formulas` makes only those named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.plan.candidates import candidates, with_keys
from conveyor.plan.command import placement
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import EngineModel, FixedDurations, Iterations
from conveyor.plan.estimate import StageSeconds, stage_seconds
from conveyor.plan.hardware import GPUS
from conveyor.plan.known_models import NAMED
from conveyor.plan.lengths import Workload
from conveyor.plan.memory import Shapes
from conveyor.plan.predict import Prediction, predict, simulated_steps
from conveyor.plan.roofline import Roofline
from conveyor.plan.simulate import Simulation, simulate
from conveyor.report.causes import idle_by_cause, idle_spells
from conveyor.report.gantt import draw_timeline
from conveyor.report.timeline import busy_bound, devices
from conveyor.types import SampleId

PAGE = Path(__file__).with_name("pipeline.md")
PICTURES = PAGE.with_name("pipeline")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ── the schedule in pictures ─────────────────────────────────────────────────────────────────────

UNEQUAL, LONG_TAIL, EQUAL = "uniform:low=40,high=160", "lognormal:mean=100,sigma=1,cap=800", "100"
DECODING = Iterations(constant=0.008, per_sample=0.0015)
"""Seconds an iteration: 17 ms with 6 samples running, 26 ms with 12."""


def small(lengths: str, *, merged: bool = False, steps: int = 3, engine: EngineModel = DECODING, **changes: object) -> Simulation:
    """Steps of 24 samples on 4 devices: 2 engines, 1 scorer, 1 trainer; merged: all of it on all 4. A micro-batch of 2 samples takes
    0.15 s to score and 0.3 s to train on one device; an update 0.2 s, a publish and an install 0.1 s each."""
    facts: dict[str, object] = {
        "step_groups": (24,) * steps, "samples_per_group": 1, "samples_per_update": 24, "micro_batch_size": 2, "engines": 2,
        "engine_slots": 6,
    }  # fmt: skip
    if merged:
        facts |= {"rollout_group": "train", "parts": (ScorePart("train", ("reward",), False),), "part_workers": (4,), "engines": 4}
    plan = RunPlan(**(facts | changes))  # type: ignore[arg-type]
    a_micro_batch = 0.3 / 4 if merged else 0.3  # the ranks of a train group share it
    trainer = TrainerCosts(Linear(a_micro_batch), update=0.2, publish=0.1)
    costs = TaskCosts(engine, {"reward": Linear(0.15)}, {"actor": trainer}, engine_install=0.1)
    return simulate(plan, costs, Workload.draw(lengths, 24 * steps, 1, prompt=1, seed=3), {"train": 4} if merged else None)


SCHEDULES: dict[str, tuple[str, Callable[[], Simulation]]] = {
    "sequential": ("one stage at a time", lambda: small(UNEQUAL, overlap=False)),
    "overlap": ("overlap, on-policy", lambda: small(UNEQUAL)),
    "staleness": ("staleness 1", lambda: small(UNEQUAL, steps=6, max_staleness=1)),
    "merged": ("all roles on all four devices", lambda: small(UNEQUAL, merged=True)),
    "equal": ("equal lengths, all samples at once", lambda: small(EQUAL, engine_slots=12)),
    "waves": ("equal lengths, two waves", lambda: small(EQUAL)),
    "tail": ("long tail, prompt order", lambda: small(LONG_TAIL)),
    "completion": ("long tail, completion order", lambda: small(LONG_TAIL, order="completion")),
    "tail_staleness": ("long tail, staleness 2", lambda: small(LONG_TAIL, steps=8, max_staleness=2)),
}
"""Name of the picture → what it shows, and the simulation."""


def draw(name: str, run: Simulation) -> None:
    """Three steps from the middle of longer runs, two of those of three."""
    shown = sorted(run.windows)[2:5] if len(run.windows) > 3 else sorted(run.windows)[:2]
    windows = {step: run.windows[step] for step in shown}
    window = (windows[shown[0]][0], windows[shown[-1]][1])
    idle = idle_by_cause(idle_spells(run.events, window), window, devices(run.events))
    PICTURES.mkdir(exist_ok=True)
    draw_timeline(run.events, windows, idle).savefig(PICTURES / f"{name}.png", dpi=80)


def schedules() -> str:
    """The step times of the pictures' schedules; draws them too when run as a program."""
    rows = []
    for name, (title, run) in SCHEDULES.items():
        simulated = run()
        pace, steps = simulated.steady(), sorted(simulated.windows)
        whole = (simulated.windows[steps[0]][0], simulated.windows[steps[-1]][1])
        efficiency = busy_bound(simulated.events, whole).efficiency
        count = devices(simulated.events)
        idle = sum(pace.idle[group] * count[group] for group in count) / sum(count.values())
        rows.append([title, f"[picture](pipeline/{name}.png)", f"{pace.step_seconds:.2f}", f"{idle:.0%}", f"{efficiency:.0%}"])
    return table(["schedule", "", "step, s", "idle, all devices", "bound / actual"], rows)


# ── formulas ─────────────────────────────────────────────────────────────────────────────────────


def flow_shop(m: int, G: float, F: float, T: float) -> float:
    """Seconds of a step of m equal micro-batches through three stages, each of which takes so long for all of them."""
    return (G + F + T) / m + (1 - 1 / m) * max(G, F, T)


def stages(m: int, G: float, F: float, T: float, *, steps: int = 1, fixed: float = 0.0, sync: float = 0.0, **changes: object) -> Simulation:
    """m micro-batches of one sample, sampled one after the other in G seconds, scored in F, trained in T.

    Args:
        fixed: seconds that each score and train task takes on top.
        sync: seconds of the update, and again of the publish and of the install.
    """
    plan = RunPlan(step_groups=(m,) * steps, samples_per_group=1, samples_per_update=m, micro_batch_size=1, engine_slots=1, **changes)  # type: ignore[arg-type]
    engine = FixedDurations({SampleId(group, 0): G / m for group in range(m * steps)})
    trainer = TrainerCosts(Linear(T / m + fixed), update=sync, publish=sync)
    costs = TaskCosts(engine, {"reward": Linear(F / m + fixed)}, {"actor": trainer}, engine_install=sync)
    return simulate(plan, costs, Workload.draw("1", m * steps, 1))


def against(formula: float, simulated: float) -> list[str]:
    return [f"{formula:.3f}", f"{simulated:.3f}", f"{simulated / formula - 1:+.1%}".replace("-0.0%", "+0.0%")]


CHECKED = ["", "formula, s", "simulator, s", "difference"]


def formulas() -> str:
    rows = []
    for G, F, T in ((6.0, 1.5, 2.5), (2.0, 1.5, 6.5), (3.0, 3.0, 3.0)):
        name = f"G {G:g}, F {F:g}, T {T:g}"
        rows.append([f"{name}: one stage at a time", *against(G + F + T, stages(10, G, F, T, overlap=False).step_seconds[1])])
        for m in (2, 10, 50):
            rows.append([f"{name}: overlap, m = {m}", *against(flow_shop(m, G, F, T), stages(m, G, F, T).step_seconds[1])])
        stale = stages(10, G, F, T, steps=9, max_staleness=1).steady().step_seconds
        rows.append([f"{name}: staleness 1", *against(max(G, F, T), stale)])
    closing = stages(10, 6, 1.5, 2.5, sync=0.2, steps=2).step_seconds[2]
    rows.append(
        ["G 6, F 1.5, T 2.5, and update, publish, install 0.2 each: overlap, m = 10", *against(flow_shop(10, 6, 1.5, 2.5) + 0.6, closing)]
    )
    return table(CHECKED, rows)


def sizes() -> str:
    """What the number of micro-batches does when each task costs something by itself."""
    G, F, T, fixed = 4.0, 1.0, 4.0, 0.05
    rows = []
    for m in (1, 2, 5, 10, 20, 50):
        rows.append([f"m = {m}", *against(flow_shop(m, G, F + m * fixed, T + m * fixed), stages(m, G, F, T, fixed=fixed).step_seconds[1])])
    return table(CHECKED, rows)


def waves() -> str:
    """Equal lengths, fewer and more samples at a time; two kinds of engine."""
    rows = []
    for slots in (12, 6, 4, 2):
        runs = [small(EQUAL, engine=engine, engine_slots=slots) for engine in (DECODING, Iterations(constant=0.026))]
        rows.append([slots, 12 // slots, *(f"{run.steady().step_seconds:.2f}" for run in runs)])
    return table(
        ["samples in an engine", "waves", "step, s: iteration 8 ms + 1.5 ms a sample", "step, s: iteration 26 ms whatever it holds"], rows
    )


SECONDS_A_TOKEN = 0.01
AT_A_TIME = 64


def expected_longest(sigma: float, count: int) -> float:
    """E[longest of `count`] / mean of a lognormal law: ∫ exp(σz − σ²/2) dΦ(z)^count, by the trapezoidal rule."""
    z = np.linspace(-10, 10, 20_001)
    at_most = np.array([NormalDist().cdf(value) for value in z]) ** count
    return float(np.trapezoid(np.exp(sigma * z - sigma**2 / 2), at_most))


def sampling_only(sigma: float, staleness: int, order: str, steps: int, seed: int = 1) -> tuple[Simulation, Workload]:
    """Steps of 64 samples in one engine with room for 64, 10 ms a token; scoring and training take no time."""
    plan = RunPlan(step_groups=(AT_A_TIME,) * steps, samples_per_group=1, samples_per_update=AT_A_TIME, micro_batch_size=8,
                   engine_slots=AT_A_TIME, max_staleness=staleness, order=order)  # type: ignore[arg-type]  # fmt: skip
    workload = Workload.draw(f"lognormal:mean=200,sigma={sigma}", AT_A_TIME * steps, 1, prompt=1, seed=seed)
    costs = TaskCosts(Iterations(constant=SECONDS_A_TOKEN), {"reward": Linear()}, {"actor": TrainerCosts(Linear())})
    return simulate(plan, costs, workload), workload


def sampling_rule(sigma: float, staleness: int) -> float:
    """A step's sampling, in times of a mean response: the engines' work, or the longest of the samples that may be on their way."""
    return max(1.0, expected_longest(sigma, AT_A_TIME * (staleness + 1)) / (staleness + 1))


def tail() -> str:
    rows = []
    for sigma in (0.5, 1.0, 1.5):
        for staleness in (0, 1, 4):
            run, workload = sampling_only(sigma, staleness, "prompt", steps=200)
            simulated, rule = run.steady().step_seconds / (workload.facts.response * SECONDS_A_TOKEN), sampling_rule(sigma, staleness)
            rows.append([f"{sigma:g}", staleness, f"{rule:.2f}", f"{simulated:.2f}", f"{simulated / rule - 1:+.0%}"])
    return table(["σ", "staleness", "rule", "simulator", "difference"], rows)


def bias() -> str:
    """Mean response of the samples that each step trains, over the mean of all; ten draws of 20 steps."""
    shown: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (3, 3), (4, 6), (7, 20))
    rows = []
    for staleness, order in ((0, "completion"), (1, "completion"), (4, "completion"), (4, "prompt")):
        trained: dict[int, list[float]] = {}
        for seed in range(10):
            run, workload = sampling_only(1.0, staleness, order, steps=20, seed=seed)
            for event in run.events:
                if event.task == "prepare":
                    lengths = [workload.at(*name).response / workload.facts.response for name in event.samples]
                    trained.setdefault(event.step, []).extend(lengths)
        means = [np.mean([length for step in range(first, last + 1) for length in trained[step]]) for first, last in shown]
        rows.append([order, staleness, *(f"{mean:.2f}" for mean in means)])
    return table(["order", "staleness", *(f"step {first}" if first == last else f"steps {first}–{last}" for first, last in shown)], rows)


def merging() -> str:
    """Four devices for work of 2·G + F + T device-seconds, divided evenly and not."""
    rows = []
    for name, merged in (("2 engines, 1 scorer, 1 trainer: overlap, on-policy", False), ("merged, overlap or not", True)):
        rows.append([name, *(f"{small(lengths, merged=merged).steady().step_seconds:.2f}" for lengths in (UNEQUAL, LONG_TAIL))])
    ahead = [small(lengths, steps=12, max_staleness=2).steady().step_seconds for lengths in (UNEQUAL, LONG_TAIL)]
    rows.insert(1, ["the same, staleness 2", *(f"{seconds:.2f}" for seconds in ahead)])
    return table(["", "unequal lengths: step, s", "long tail: step, s"], rows)


# ── predictions ──────────────────────────────────────────────────────────────────────────────────

LAWS = {
    "short": ("lognormal:mean=300,sigma=0.5", 1024),
    "lognormal": ("lognormal:mean=1000,sigma=1", 8192),
    "heavy tail": ("pareto:mean=2000,alpha=1.5", 16_384),
}
"""Response lengths in tokens, and where they are cut (`rollout.max_response_length`)."""
CLUSTERS = {("8b", 32): 128, ("8b", 256): 512, ("70b", 32): 128, ("70b", 256): 512}
"""(policy, GPUs) → prompts a step."""
WAYS = {
    "merged roles": (0, True),
    "sequential": (0, False),
    "overlap, on-policy": (0, True),
    "staleness 1": (1, True),
    "staleness 4": (4, True),
}
"""Schedule → staleness, overlap."""
PROMPT = 256
"""Tokens."""
SIMULATED = {32: 4, 256: 3}
"""GPUs → splits simulated for each line; the estimate orders them."""
WIDTHS = (1, 2, 4, 8)


def predicted_recipe(model: str, gpus: int, cap: int) -> OnlineRecipe:
    """GRPO with groups of 8, KL to a reference and an 8B reward model; one update a step."""
    recipe = parse_recipe({
        "method": "grpo", "output_dir": "runs/x", "rewards": [{"name": "judge", "model": "judge"}], "data": {"path": "prompts"},
        "model": {"path": model, "dtype": "bfloat16", "gradient_checkpointing": True},
        "rollout": {"max_response_length": cap, "n_samples_per_prompt": 8},
        "train": {"rollout_batch_size": CLUSTERS[model, gpus], "zero_stage": 3, "offload_optimizer": (model, gpus) == ("70b", 32)},
        "pipeline": {"order": "completion"},
    })  # fmt: skip
    assert isinstance(recipe, OnlineRecipe)
    return recipe


@cache
def predicted(model: str, gpus: int, law: str, order: str = "completion") -> dict[str, Prediction]:
    """Schedule → the best of the placements simulated."""
    text, cap = LAWS[law]
    recipe = with_keys(predicted_recipe(model, gpus, cap), pipeline={"order": order})
    source = Roofline(Shapes(NAMED[model], NAMED["8b"]), GPUS["h100"])
    workload = Workload.draw(f"{text},cap={cap}", recipe.train.rollout_batch_size * simulated_steps(4), 8, PROMPT)
    ahead = with_keys(recipe, pipeline={"max_staleness": 4})  # more samples in flight, so more concurrency is looked at
    apart = [one for one in candidates(ahead, source, workload.facts, gpus, WIDTHS) if len(one.devices or {}) > 1]
    fitting = [one for one in apart if _need(one, source, workload) <= 1]
    merged = _merged(recipe, source, workload, gpus)
    found = {}
    alike, mixed = (_Estimates(source, _views(workload, recipe, alike)) for alike in (order == "completion", False))
    for way, (staleness, overlap) in WAYS.items():
        placed, estimates = merged if way == "merged roles" else fitting, mixed if staleness else alike
        splits: dict[tuple[object, ...], OnlineRecipe] = {}
        for one in estimates.ordered(placed, staleness, overlap):
            splits.setdefault((*sorted((one.devices or {}).items()), one.rollout.tensor_parallel_size), one)
        ready = [with_keys(one, pipeline={"max_staleness": staleness, "overlap": overlap}) for one in splits.values()]
        simulated = [predict(one, source, workload) for one in ready[: SIMULATED[gpus]]]
        found[way] = min(simulated, key=lambda one: one.step_seconds)
    return found


def _need(recipe: OnlineRecipe, source: Roofline, workload: Workload) -> float:
    """Memory of the fullest GPU, in times of what it may hold."""
    return max(group.total / group.limit for group in source.memory(recipe, workload.facts))


def _merged(recipe: OnlineRecipe, source: Roofline, workload: Workload, gpus: int) -> list[OnlineRecipe]:
    """Also with tensor parallelism, which the search leaves out on a group that trains. If none fits, the one that needs least."""
    placed = recipe.model_copy(update={"devices": {"train": float(gpus)}, "roles": {"rollout": "train", "score": "train"}})
    share = recipe.samples_per_step // gpus
    every = [
        with_keys(
            placed, rollout={"tensor_parallel_size": width, "max_concurrent_requests": slots}, pipeline={"micro_batch_size": gpus * k}
        )
        for width in WIDTHS
        for slots in sorted({max(8, share * width // parts // 8 * 8) for parts in (1, 2, 4)})
        for k in (1, 2, 4, 8)
        if gpus * k <= recipe.samples_per_step
    ]
    needs = [_need(one, source, workload) for one in every]
    return [one for one, need in zip(every, needs, strict=True) if need <= max(1.0, min(needs))]


VIEWS = 4


def _views(workload: Workload, recipe: OnlineRecipe, alike: bool) -> list[Workload]:
    """The estimate takes the times of tasks from the first micro-batch: the same samples, others of them in front. `alike`: as they finish
    on-policy, the samples of a micro-batch are of about one length."""
    groups = recipe.train.rollout_batch_size
    step = workload.responses[:groups]
    step = np.sort(step, axis=None).reshape(step.shape) if alike else step
    starts = [groups * (2 * view + 1) // (2 * VIEWS) for view in range(VIEWS)]
    return [Workload(np.concatenate([np.roll(step, -start, axis=0), workload.responses[groups:]]), workload.prompts) for start in starts]


class _Estimates:
    """Estimated step times, with tasks as long as they are on average over some micro-batches."""

    def __init__(self, source: Roofline, views: Sequence[Workload]) -> None:
        self._source, self._views = source, views
        self._known: dict[tuple[int, int], StageSeconds] = {}

    def ordered(self, recipes: Sequence[OnlineRecipe], staleness: int, overlap: bool) -> list[OnlineRecipe]:
        """Those worth simulating first: ordered by one view, the best of them by all."""
        rough = sorted(recipes, key=lambda one: self._step(one, staleness, overlap, 1))
        return sorted(rough[:150], key=lambda one: self._step(one, staleness, overlap, VIEWS))

    def _step(self, recipe: OnlineRecipe, staleness: int, overlap: bool, views: int) -> float:
        """A sample may last max_staleness + 1 steps and no longer, which the planner's own estimate leaves out."""
        found = [self._seconds(recipe, view) for view in range(views)]
        groups = {group: sum(one.groups[group] for one in found) / views for group in found[0].groups}
        seconds = replace(found[0], groups=groups, overlap=overlap, streams=overlap)
        return max(seconds.step(staleness), seconds.longest / (staleness + 1))

    def _seconds(self, recipe: OnlineRecipe, view: int) -> StageSeconds:
        key = id(recipe), view
        if key not in self._known:
            self._known[key] = stage_seconds(recipe, self._source, self._views[view])
        return self._known[key]


def predictions() -> str:
    parts = []
    for model, gpus in CLUSTERS:
        rows = []
        for law in LAWS:
            found = predicted(model, gpus, law)
            rows += [prediction_row(law, way, one) for way, one in found.items()]
            print(f"{model}, {gpus} GPUs, {law}", flush=True)
        offload = ", optimizer in host memory" if (model, gpus) == ("70b", 32) else ""
        head = f"**Prediction: {model.upper()} on {gpus} H100, {CLUSTERS[model, gpus]} prompts × 8 samples a step{offload}**"
        columns = ["lengths", "schedule", "GPUs", "TP", "in an engine", "micro-batch", "step, s", "samples per GPU-hour", "idle"]
        parts.append(f"{head}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def prediction_row(law: str, way: str, found: Prediction) -> list[object]:
    recipe, counts = found.recipe, dict(found.recipe.devices or {})
    idle = sum(found.idle[group] * count for group, count in counts.items()) / sum(counts.values())
    where = f"all {next(iter(counts.values())):g}" if len(counts) == 1 else placement(recipe)
    short = [group for group in found.memory if not group.fits]
    if short:
        where += f"; does not fit, needs {short[0].total / 1e9:.0f} of {short[0].limit / 1e9:.0f} GB"
    return [
        law, way, where, recipe.rollout.tensor_parallel_size, recipe.rollout.max_concurrent_requests, recipe.pipeline.micro_batch_size,
        f"{found.step_seconds:.0f}", f"{1000 / found.device_hours_per_1000:.0f}", f"{idle:.0%}",
    ]  # fmt: skip


def orders() -> str:
    """What the order of micro-batches does to one of the predictions."""
    rows = []
    for order in ("prompt", "completion"):
        found = predicted("8b", 32, "lognormal", order)
        rows.append([order, *(f"{one.step_seconds:.0f}" for one in found.values())])
    return table(["`pipeline.order`", *(f"{way}: step, s" for way in WAYS)], rows)


# ── the page ─────────────────────────────────────────────────────────────────────────────────────

BLOCKS: dict[str, Callable[[], str]] = {
    "schedules": schedules, "formulas": formulas, "sizes": sizes, "waves": waves, "tail": tail, "bias": bias, "merging": merging,
    "orders": orders, "predictions": predictions,
}  # fmt: skip


def with_block(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    assert page.count(begin) == page.count(end) == 1, f"{PAGE} has no block {name}"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def block(page: str, name: str) -> str:
    """What stands between the markers."""
    return page.split(f"<!-- {name} -->\n", 1)[1].split(f"\n<!-- end {name} -->", 1)[0]


def main(names: Sequence[str]) -> None:
    for name in names:
        text = BLOCKS[name]()
        PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    if "schedules" in names:
        for name, (_, run) in SCHEDULES.items():
            draw(name, run())


if __name__ == "__main__":
    main(sys.argv[1:] or list(BLOCKS))
