"""Reward functions: found by name, called in a process of their own that a time-out can end."""

from conveyor.rewards.functions import check_columns, load_function
from conveyor.rewards.scorer import FunctionReward, FunctionScores, RewardError

__all__ = ["FunctionReward", "FunctionScores", "RewardError", "check_columns", "load_function"]
