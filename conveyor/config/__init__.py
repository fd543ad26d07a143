"""Recipes: what a user may set, and the one line they get when it is wrong."""

from conveyor.config.load import RunError, UserError, load_recipe, parse_recipe
from conveyor.config.recipe import OfflineRecipe, OnlineRecipe

__all__ = ["OfflineRecipe", "OnlineRecipe", "RunError", "UserError", "load_recipe", "parse_recipe"]
