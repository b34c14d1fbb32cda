"""Define the errors that a user can mend, and those that stronger damping may mend."""


class UserError(Exception):
    """Says that something that the user gave cannot work.

    The message says what is wrong, where (the YAML key or the file), what was expected and what to
    do. The command line prints it as one line, without a traceback, and exits with status 2.
    """


class NumericalError(Exception):
    """Says that a matrix cannot be factored, or that a loss is not a finite number.

    Stronger damping may help, so the block under way is tried once more with it.
    """
