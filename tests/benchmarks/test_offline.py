"""What the benchmark of the offline methods trains, and how it comes to its numbers."""

import numpy as np
import pytest

from benchmarks import offline, offline_sides


def test_lengths_are_lognormal_and_follow_from_the_seed() -> None:
    lengths = offline_sides.lengths(4000, seed=1)
    assert lengths == offline_sides.lengths(4000, seed=1)
    assert min(lengths) >= offline_sides.SHORTEST and max(lengths) == offline_sides.MAX_LENGTH
    assert np.median(lengths) == pytest.approx(offline_sides.MEDIAN, rel=0.05)
    assert np.quantile(np.log(lengths), 0.159) == pytest.approx(np.log(offline_sides.MEDIAN) - offline_sides.SIGMA, abs=0.08)


def test_a_pairs_sides_share_their_prompt_and_learn_the_rest() -> None:
    for pair in offline_sides.pairs():
        start = pair.chosen.prompt_length
        assert start == pair.rejected.prompt_length
        assert pair.chosen.ids[:start].tolist() == pair.rejected.ids[:start].tolist()
        columns = offline_sides._columns(pair)
        assert columns["prompt_ids"] + columns["chosen_ids"] == pair.chosen.ids.tolist()
        assert len(columns["rejected_ids"]) == pair.rejected.loss_tokens > 0


def test_supervised_samples_are_learnt_whole() -> None:
    assert all(sample.loss_tokens == len(sample.ids) - 1 for sample in offline_sides.supervised_samples())


def test_rates_compare_with_trls_fastest_mode_that_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"conveyor/padded": 10, "conveyor/packed": 20, "trl/padded": 4, "trl/packed": 40, "trl/padding_free": 8, "conveyor/dpo": 6,
              "trl/dpo": 3}  # fmt: skip
    rates = {mode: {"wall": [1.0, float(speed), 100.0], "cpu": [float(speed)] * 3} for mode, speed in speeds.items()}
    facts = {"packed_difference": 0.1, "padding_free_difference": 1e-6}
    monkeypatch.setattr(offline, "_measure", lambda say: (rates, facts))
    found = {result.name: result for result in offline.run(None, print)}  # type: ignore[arg-type]
    assert {name: (result.value, result.holds) for name, result in found.items()} == {
        "offline_packing": (2.0, True), "offline_sft_trl": (2.5, True), "offline_dpo_trl": (2.0, True),
    }  # fmt: skip
    assert "padding_free" in found["offline_sft_trl"].what
