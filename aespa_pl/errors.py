"""Define the errors that end a command, and those that stronger damping may mend."""

import re

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that move the cursor, change colours or turn the direction of a text."""
LONG_WORD = re.compile(r"(\S{200})\S{101,}(\S{80})")
NOTHING_LOST = "nothing is lost"
"""Begins the note of an error that nobody foresaw, before how to continue."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Matches the memory address in Python's own text of an object."""


class UserError(Exception):
    """Says what the user gave that cannot work, where (YAML key or file), what was expected and what to do.

    The command line prints it as one line, without a traceback, and exits with status 2.
    """


class EndedError(Exception):
    """Ends the command with a message and a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NumericalError(Exception):
    """Says that a matrix can't be factored, or a loss is not finite; stronger damping may help."""


def printable(text: str) -> str:
    r"""Return a text whose control characters are codes such as ``\x1b``: it acts on no terminal."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(message: str) -> str:
    """Return a message as one line for a person: words that nobody reads to their end are shortened."""
    text = ADDRESS.sub("", printable(" ".join(message.split())))
    return LONG_WORD.sub(r"\1...\2", text)


def system_words(error: OSError) -> str:
    """Return what the system says went wrong, with the file where it names one."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message; the name of the error where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
