"""Stages: weights change only when nothing of the stages before is in an engine."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.stages import Stages


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_every_prompt_is_sampled_once_by_its_stage_and_no_stage_overtakes(sizes, random):
    """Prompts ask in order and leave in any order; entering takes a while."""

    async def play():
        entered, log = [], []
        in_engine: set[int] = set()

        async def enter(stage):
            assert not in_engine, "weights change under a sample"
            await asyncio.sleep(0)
            assert not in_engine
            entered.append(stage)

        stages = Stages(sizes, enter)
        stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]

        async def sample(place):
            await stages.admit(place)
            assert entered[-1] == stage_of[place], "sampled by other weights"
            in_engine.add(place)
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            in_engine.discard(place)
            log.append(place)
            stages.left(place)

        await asyncio.wait_for(asyncio.gather(*(sample(place) for place in range(len(stage_of)))), 5)
        assert sorted(log) == list(range(len(stage_of)))
        assert entered == sorted({*stage_of}), "each stage that has prompts once, in order"

    asyncio.run(play())


def test_a_stage_whose_weights_fail_says_so_to_all_its_prompts():
    async def play():
        async def enter(stage):
            if stage:
                raise ValueError("no weights")

        stages = Stages([1, 2], enter)
        await stages.admit(0)
        stages.left(0)
        for place in (1, 2):
            with pytest.raises(ValueError, match="no weights"):
                await stages.admit(place)

    asyncio.run(play())
