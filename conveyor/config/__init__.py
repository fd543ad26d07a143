"""Recipes: what a user may set, and the one line they get when it is wrong."""

from conveyor.config.load import RunError, UserError, load_recipe, parse_recipe
from conveyor.config.loops import LoopRecipe
from conveyor.config.offline import OfflineRecipe
from conveyor.config.recipe import OnlineRecipe, Recipe

__all__ = ["LoopRecipe", "OfflineRecipe", "OnlineRecipe", "Recipe", "RunError", "UserError", "load_recipe", "parse_recipe"]
