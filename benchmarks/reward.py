"""A reward that takes no time, so that it stands in nobody's way."""


def letters(prompts, completions, **columns):
    """Share of lowercase letters: almost every sample has its own."""
    return [sum(character.islower() for character in text) / max(1, len(text)) for text in completions]
