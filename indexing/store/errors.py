"""Errors that tell a user that their input is wrong."""


class InputError(ValueError):
    """A user's mistake: a bad file, key, line or setting.

    The message names what is wrong, what was found, what is accepted, and what to do next. The command line prints it without a
    traceback and exits with status 2. Any other exception that escapes is our bug.
    """


class NotFound(InputError):
    """Nothing has the requested id; over HTTP this is status 404."""
