"""Weights that were published and are still to be installed somewhere."""

from __future__ import annotations

from conveyor.workers.reports import Publication


class Publications:
    """The newest of each role, and the one that a refreshed reference is still to take. Letting go of one frees its weights."""

    def __init__(self, refresh: int | None) -> None:
        """refresh: steps after which the reference becomes the policy anew."""
        self._refresh = refresh
        self._kept: dict[tuple[str, int], Publication] = {}

    def add(self, publication: Publication) -> None:
        role, version = publication.role, publication.version
        wanted = {version} if self._refresh is None else {version, version // self._refresh * self._refresh}
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] != role or key[1] in wanted}
        self._kept[role, version] = publication

    def get(self, role: str, version: int) -> Publication:
        return self._kept[role, version]
