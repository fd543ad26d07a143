"""Recipes: what a user may set, and the one line they get when it is wrong."""

from conveyor.config.load import load_recipe, parse_recipe
from conveyor.config.loops import LoopRecipe
from conveyor.config.offline import OfflineRecipe
from conveyor.config.recipe import OnlineRecipe, Recipe
from conveyor.errors import RunError, UserError

__all__ = ["LoopRecipe", "OfflineRecipe", "OnlineRecipe", "Recipe", "RunError", "UserError", "load_recipe", "parse_recipe"]
