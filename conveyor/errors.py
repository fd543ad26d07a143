"""What a user is told in one line."""


class UserError(Exception):
    """Bad input: shown as one line, exit status 2. The text names the key, file or row."""


class RunError(Exception):
    """A run that had to end for a reason its text explains: shown as one line, exit status 1."""
