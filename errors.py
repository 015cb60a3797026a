"""The error that a user's mistake raises: bad files, a mesh that does not fit, options that exclude each other."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something given to shardzoo is wrong; the message names it, the numbers, and what to change.

    The command line prints the message and exits with status 1, with no traceback.
    """


def fail_if(problems: Iterable[str], title: str) -> None:
    """Raises one `InputError` that lists all `problems` under `title`, or puts a single one beside it."""
    listed = list(problems)
    if len(listed) == 1:
        raise InputError(f"{title}: {listed[0]}")
    if listed:
        raise InputError("\n  ".join([f"{title}:", *listed]))
