"""Engines beside the session's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.config import sections
from tests.conftest import rollout_engine
from tests.tiny import save_tiny_policy

PLAYS = Path(__file__).parents[1] / "episodes" / "plays.py"
MULTI_TURN = sections.MultiTurn(function=f"{PLAYS}:play", max_turns=4, timeout=3.0)


@pytest.fixture(scope="package", autouse=True)
def _engines_ahead(request: pytest.FixtureRequest) -> None:
    """They start beside the tests that come before theirs."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in ("second_engine", "playing"):
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="package")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose output layer is its embedding."""
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="package")
def second_engine(engine: Any, tied_policy: Path) -> Iterator[Any]:
    """Another engine, of the tied policy; the last test of test_rollout.py breaks it."""
    with rollout_engine(tied_policy) as started:
        yield started


@pytest.fixture(scope="package")
def playing(engine: Any, tiny_policy: Path) -> Iterator[Any]:
    """The shared engine's twin, whose samples are played; the last test of test_rollout_turns.py ends it."""
    with rollout_engine(tiny_policy, multi_turn=MULTI_TURN) as started:
        yield started
