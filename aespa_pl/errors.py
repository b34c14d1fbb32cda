"""The one exception that is a user's to mend, not ours."""


class UserError(Exception):
    """Something that the user gave cannot work.

    The message says what is wrong, where (the YAML key or the file), what was expected and what to
    do. The command line prints it as one line, without a traceback, and exits with status 2.
    """


class NumericalError(Exception):
    """A matrix cannot be factored, or a loss is not a finite number.

    Stronger damping may help, so the block under way is tried once more with it.
    """
