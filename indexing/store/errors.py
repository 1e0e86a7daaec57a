"""The one way to tell a user that their input is wrong."""


class InputError(ValueError):
    """A user's mistake: a bad file, key, line or setting.

    The message names what is wrong, what was found, what is accepted, and what to do next. The command line prints it
    without a traceback and exits with status 2; everything else that escapes is a bug of ours.
    """


class NotFound(InputError):
    """There is nothing with the id that was asked for; over HTTP, 404."""
