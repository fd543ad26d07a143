"""Steps by hand, and events at random."""

from hypothesis import strategies as st

from conveyor.report.events import Event


def event(worker, task, start, end, *, step=1, micro_batch=None, group=None, device=None, role="role", samples=()):
    return Event(group or worker.split()[0], worker, role, task, step, micro_batch, step - 1, start, end, device or worker, samples)


A, B, C = (0, 0), (1, 0), (2, 0)

# 0 … 12 s (| = 1 s). Micro-batch 0 is A and C, micro-batch 1 is B.
#   rollout 0  A·A·AB·B·B········i    A 0–4, B 2–6, install 11–12
#   rollout 1  C·C·C·············i    C 0–3, install 11–12
#   score 0    ········0··1······     0 at 4–5, 1 at 6.5–7.5
#   train 0    ·········00·1·u·p·     0 at 5–7, 1 at 7.5–9, update 9–10, publish 10–11
STREAMED = [
    event("rollout 0", "rollout", 0, 4, samples=(A,)),
    event("rollout 0", "rollout", 2, 6, samples=(B,)),
    event("rollout 1", "rollout", 0, 3, samples=(C,)),
    event("score 0", "score", 4, 5, micro_batch=0, samples=(A, C)),
    event("score 0", "score", 6.5, 7.5, micro_batch=1, samples=(B,)),
    event("train 0", "train", 5, 7, micro_batch=0),
    event("train 0", "train", 7.5, 9, micro_batch=1),
    event("train 0", "update", 9, 10),
    event("train 0", "publish", 10, 11),
    event("rollout 0", "install", 11, 12),
    event("rollout 1", "install", 11, 12),
]

# The same kind of step with one stage at a time: A 0–2, B 0–5, scores 5–7, training 7–9, update 9–9.5, publish 9.5–10, install 10–11.
STAGE_BY_STAGE = [
    event("rollout 0", "rollout", 0, 2, samples=(A,)),
    event("rollout 0", "rollout", 0, 5, samples=(B,)),
    event("score 0", "score", 5, 6, micro_batch=0, samples=(A,)),
    event("score 0", "score", 6, 7, micro_batch=1, samples=(B,)),
    event("train 0", "train", 7, 8, micro_batch=0),
    event("train 0", "train", 8, 9, micro_batch=1),
    event("train 0", "update", 9, 9.5),
    event("train 0", "publish", 9.5, 10),
    event("rollout 0", "install", 10, 11),
]

TASKS = ("rollout", "judge", "score", "prepare", "train", "update", "publish", "install", "checkpoint", "something else")


@st.composite
def any_events(draw):
    """Events that need not make sense together."""
    times = st.integers(0, 20)
    events = []
    for _ in range(draw(st.integers(0, 14))):
        start = draw(times)
        group, number = draw(st.sampled_from(["one", "two"])), draw(st.integers(0, 1))
        micro_batch = draw(st.none() | st.integers(0, 1))
        samples = tuple((draw(st.integers(0, 2)), 0) for _ in range(draw(st.integers(0, 2))))
        events.append(
            Event(
                group,
                f"{draw(st.sampled_from(['rollout', 'score', 'train']))} {group} {number}",
                draw(st.sampled_from(["a", "b"])),
                draw(st.sampled_from(TASKS)),
                draw(st.integers(1, 3)),
                micro_batch,
                None,
                start,
                start + draw(st.integers(0, 6)),
                draw(st.sampled_from([None, f"{group} {number}"])),
                samples,
            )
        )
    return events
