"""Samples of several turns, played by a function of the user's: tools, games, environments.

engine thread                               its other threads          child process
episodes.py   ── start, turn, drop ──────▶  process.py  ── pipe ──▶    child.py: the function, a task for each sample
(token ids)   ◀─ generate, ended, restarted ─           ◀──────────
"""

from conveyor.episodes.functions import EpisodeError, Turn, load_rollout_function

__all__ = ["EpisodeError", "Turn", "load_rollout_function"]
