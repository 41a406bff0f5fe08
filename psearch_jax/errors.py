"""The errors that a person is meant to read."""


class UserError(Exception):
    """A mistake the user can mend: one sentence that names the thing, its value and the remedy.

    The command line prints the sentence without a traceback and exits with code 2.
    """


class Interrupted(Exception):
    """A run was stopped on purpose (Ctrl-C) after saving; the message says how to go on. Exit code 130."""
