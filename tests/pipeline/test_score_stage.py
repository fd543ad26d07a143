"""The score stage: judging and score parts in either order, and versions of snapshots and references."""

from conveyor.pipeline.actions import InstallSnapshot, Judge, Score
from conveyor.pipeline.batching import MicroBatch
from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.pipeline.score_stage import ScoreStage
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey

ONE, TWO = SampleId(0, 0), SampleId(0, 1)


def stage(*parts: ScorePart, workers: int = 1, version: int = 0, **more: object) -> ScoreStage:
    plan = RunPlan(step_groups=(1,) * 8, samples_per_group=2, samples_per_update=2, micro_batch_size=2, judged=True, parts=parts,
                   part_workers=(workers,) * len(parts), **more)  # fmt: skip
    return ScoreStage(plan, version)


def micro_batch(step: int = 0, number: int = 0) -> MicroBatch:
    return MicroBatch(MicroBatchKey(step, 0, number), (ONE, TWO))


def score(made: ScoreStage) -> list[Score | InstallSnapshot]:
    """Carry out everything that is due."""
    log = []
    while due := next(made.due(), None):
        made.start(due)
        made.done(due)
        log.append(due)
    return log


def test_a_micro_batch_is_ready_when_it_is_scored_and_judged_in_either_order() -> None:
    for judged_first in (True, False):
        made = stage(ScorePart("score", ("r",), False))
        for sample in (ONE, TWO):
            made.judge(sample)
        assert made.take_unjudged() == [Judge(ONE), Judge(TWO)] and made.take_unjudged() == []
        made.judged(ONE)  # before its micro-batch is made
        made.add(micro_batch())
        if judged_first:
            made.judged(TWO)
            assert made.take_ready() == []
            assert len(score(made)) == 1
        else:
            assert len(score(made)) == 1
            assert made.take_ready() == []
            made.judged(TWO)
        assert [ready.key for ready in made.take_ready()] == [MicroBatchKey(0, 0, 0)] and made.take_ready() == []
        assert not made.micro_batches and not made._unjudged


def test_without_any_part_judging_is_all() -> None:
    made = stage()
    made.judge(ONE)
    made.judge(TWO)
    made.judged(TWO)
    made.add(micro_batch())
    assert list(made.due()) == [] and made.take_ready() == []
    made.judged(ONE)
    assert len(made.take_ready()) == 1


def test_the_oldest_step_goes_first_and_waits_for_its_snapshot() -> None:
    made = stage(ScorePart("score", ("policy_snapshot",), True))
    made.add(micro_batch(1))
    assert list(made.due()) == []
    made.add(micro_batch(0))
    assert [action.key.step for action in score(made)] == [0]
    made.published(1)
    done = score(made)
    assert done == [InstallSnapshot(0, 0, 1), Score(0, 0, MicroBatchKey(1, 0, 0), (ONE, TWO))] and not made.installing


def test_a_reference_is_refreshed_on_every_worker_and_only_then() -> None:
    made = stage(ScorePart("score", ("reference",), False, refresh=3), workers=2)
    log = []
    for version in range(7):
        if version:
            made.published(version)
        made.add(micro_batch(version))
        log += score(made)
    installs = [action for action in log if isinstance(action, InstallSnapshot)]
    assert sorted((action.version, action.worker) for action in installs) == [(3, 0), (3, 1), (6, 0), (6, 1)]
    assert [action.key.step for action in log if isinstance(action, Score)] == list(range(7))


def test_what_a_resumed_run_s_reference_holds() -> None:
    """At step 4 that of the checkpoint; at step 3 the one that is published first; at step 2 its own first weights."""
    reference = ScorePart("score", ("reference",), False, refresh=3)
    held = {start: stage(reference, version=start - 1, start_step=start, initial_sync=True)._versions for start in (2, 3, 4, 6)}
    assert held == {2: {(0, 0): 0}, 3: {(0, 0): 2}, 4: {(0, 0): 3}, 6: {(0, 0): 5}}
