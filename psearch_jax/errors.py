"""The errors that a person is meant to read."""


class UserError(Exception):
    """A mistake the user can mend: one sentence that names the thing, its value and the remedy.

    The command line prints the sentence without a traceback and exits with code 2.
    """


class Interrupted(Exception):
    """A run was stopped on purpose after saving; the message says how to go on. Exit code 130 after Ctrl-C, and 0 after
    SIGTERM: a scheduler takes anything else for a failure."""

    def __init__(self, message: str, *, code: int = 130) -> None:
        super().__init__(message)
        self.code = code
