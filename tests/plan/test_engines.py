"""Engines that jump from event to event, against hand-computed times and an engine that walks token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.plan.engines import FixedDurations, Iterations
from conveyor.plan.lengths import Size
from conveyor.types import SampleId


def finishes(engine) -> dict[int, float]:
    found = {}
    while (when := engine.next_finish()) is not None:
        found |= {sample.group: when for sample in engine.finish()}
    return found


def test_samples_share_iterations() -> None:
    engine = Iterations(constant=0.010, per_sample=0.001).start()
    engine.admit([(SampleId(0, 0), Size(5, 2))], 0.0)
    engine.admit([(SampleId(1, 0), Size(5, 4))], 0.0)
    # Two iterations with both, two more with the longer alone.
    assert finishes(engine) == pytest.approx({0: 2 * 0.012, 1: 2 * 0.012 + 2 * 0.011})


def test_a_prompt_waits_for_the_iteration_and_holds_the_others_up() -> None:
    engine = Iterations(constant=1.0, per_prompt_token=0.1).start()
    engine.admit([(SampleId(0, 0), Size(0, 3))], 0.0)
    engine.admit([(SampleId(1, 0), Size(5, 1))], 1.5)  # joins at 2.0, computed until 2.5
    assert finishes(engine) == pytest.approx({0: 3.5, 1: 3.5})


def test_an_install_waits_for_the_iteration_and_computes_the_cache_anew() -> None:
    engine = Iterations(constant=1.0, per_prompt_token=0.1).start()
    engine.admit([(SampleId(0, 0), Size(10, 4))], 0.0)  # prompt until 1.0, then iterations until 5.0
    assert engine.install(7.0, 2.5) == (3.0, 10.0)
    # Two tokens and the prompt's ten are computed again: 1.2 s; two iterations are left.
    assert finishes(engine) == pytest.approx({0: 10.0 + 1.2 + 2.0})


def test_weights_and_arithmetic_hide_behind_one_another_and_the_cache_grows() -> None:
    model = Iterations(weights=1.0, compute=0.25, per_cached_token=0.5)
    assert (model.seconds(2, 0), model.seconds(8, 0), model.seconds(2, 10)) == (1.0, 2.0, 6.0)
    engine = model.start()
    engine.admit([(SampleId(0, 0), Size(4, 3))], 0.0)
    assert finishes(engine) == pytest.approx({0: (1 + 2.0) + (1 + 2.5) + (1 + 3.0)})


def test_fixed_durations_know_nothing_of_one_another() -> None:
    engine = FixedDurations({SampleId(0, 0): 3.0, SampleId(1, 0): 1.0}).start()
    engine.admit([(SampleId(0, 0), Size(1, 1)), (SampleId(1, 0), Size(1, 1))], 2.0)
    assert engine.install(5.0, 2.0) == (2.0, 7.0)
    assert finishes(engine) == {1: 3.0, 0: 5.0}


def walk(model: Iterations, arrivals: list[tuple[float, int, int]]) -> dict[int, float]:
    """Token by token: when each sample is done."""
    clock, running, done, waiting = 0.0, {}, {}, list(enumerate(arrivals))
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= clock:
            number, (_, prompt, response) = waiting.pop(0)
            clock += model.per_prompt_token * prompt
            running[number] = [prompt, response]
        clock += model.seconds(len(running), sum(tokens for tokens, _ in running.values()))
        for number in list(running):
            running[number][0] += 1
            running[number][1] -= 1
            if not running[number][1]:
                done[number] = clock
                del running[number]
    return done


# Numbers without small common multiples: whether a prompt joins before or after an iteration that ends just then is rounding.
numbers = st.integers(1, 70).map(lambda k: k * 0.0141421356)


@settings(max_examples=150, deadline=None)
@given(
    model=st.builds(Iterations, constant=numbers, per_sample=numbers, weights=numbers, compute=numbers, per_cached_token=numbers),
    arrivals=st.lists(
        st.tuples(st.integers(0, 400).map(lambda k: k * 0.1732050808), st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=6
    ),
)
def test_jumps_end_where_steps_end(model: Iterations, arrivals: list[tuple[float, int, int]]) -> None:
    arrivals.sort()
    engine, found = model.start(), {}
    for number, (when, prompt, response) in enumerate(arrivals):
        while (due := engine.next_finish()) is not None and due <= when:
            found |= {sample.group: due for sample in engine.finish()}
        engine.admit([(SampleId(number, 0), Size(prompt, response))], when)
    assert found | finishes(engine) == pytest.approx(walk(model, arrivals))
