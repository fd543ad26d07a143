import numpy as np
import pytest

from conveyor.config import UserError
from conveyor.plan.lengths import Lengths, Size, Workload, parse_lengths
from conveyor.types import SampleId


@pytest.mark.parametrize(
    ("text", "mean", "tolerance"),
    [
        ("constant:value=40", 40, 0),
        ("40", 40, 0),
        ("uniform:low=10,high=90", 50, 1),
        ("lognormal:mean=800,sigma=1", 800, 20),
        ("pareto:mean=300,alpha=3", 300, 10),
    ],
)
def test_lengths_have_the_mean_asked_for(text: str, mean: float, tolerance: float) -> None:
    drawn = parse_lengths(text).draw(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(mean, abs=tolerance)
    assert drawn.min() >= 1


def test_a_cap_cuts_and_the_texts_own_cap_wins() -> None:
    assert parse_lengths("pareto:mean=300,alpha=1.1", cap=1000).draw(10_000, np.random.default_rng(0)).max() == 1000
    assert parse_lengths("pareto:mean=300,alpha=1.1,cap=5000", cap=1000).cap == 1000, "the recipe's limit"
    assert parse_lengths("pareto:mean=300,alpha=1.1,cap=500", cap=1000) == Lengths("pareto", {"mean": 300, "alpha": 1.1}, 500)


def test_the_same_seed_gives_the_same_lengths() -> None:
    one, two, other = (Workload.draw("lognormal:mean=50,sigma=1", 20, 4, seed=seed).responses for seed in (1, 1, 2))
    assert (one == two).all()
    assert (one != other).any()


def test_facts_weigh_running_samples_by_their_length() -> None:
    workload = Workload(np.array([[10, 30]]), np.array([5]))
    assert workload.size(SampleId(0, 1)) == Size(5, 30)
    # A sample found running is the long one in 30 of 40 moments, and half done: (10·10 + 30·30) / (2·40).
    assert workload.facts.resident == 5 + 12.5
    assert (workload.facts.prompt, workload.facts.response, workload.facts.longest) == (5, 20, 35)


@pytest.mark.parametrize(
    "text",
    ["", "gauss:mean=3", "lognormal:mean=3", "lognormal:mean=3,sigma=1,tail=2", "uniform:low=9,high=2", "uniform:low=x,high=2",
     "pareto:mean=9,alpha=1", "constant:value=0", "lognormal:mean=nan,sigma=1", "constant:value=inf"],
)  # fmt: skip
def test_what_is_no_law_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^--lengths: ") as error:
        parse_lengths(text)
    assert "\n" not in str(error.value)
