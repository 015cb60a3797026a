"""The error that a user's mistake raises: bad files, a mesh that does not fit, options that exclude each other."""

import math
from collections.abc import Iterable
from numbers import Integral, Real


class InputError(ValueError):
    """Something given to shardzoo is wrong; the message names it, the numbers, and what to change.

    The command line prints the message and exits with status 1, with no traceback.
    """


def not_above_zero(config: object, *names: str) -> list[str]:
    """What is wrong with the numbers of a config that are divided by: those not above 0, or not finite."""
    values = {name: getattr(config, name) for name in names}
    return [f"{n}={v} is not a number above 0: change it" for n, v in values.items() if not 0 < v < math.inf]


def fail_if(problems: Iterable[str], title: str) -> None:
    """Raises one `InputError` that lists all `problems` under `title`, or puts a single one beside it."""
    listed = list(problems)
    if len(listed) == 1:
        raise InputError(f"{title}: {listed[0]}")
    if listed:
        raise InputError("\n  ".join([f"{title}:", *listed]))


def not_whole(**values: object) -> list[str]:
    """The problems of what should be whole numbers, by name: also of floats that hold one, as a range refuses them."""
    return [
        f"{name}={value!r} is not a whole number: change it"
        for name, value in values.items()
        if not isinstance(value, Integral) or isinstance(value, bool)
    ]


def not_scales(**values: object) -> list[str]:
    """The problems of what something is to be multiplied by, by name: what is no number of 0 or more, or not finite."""
    return [
        f"{name}={value!r} is not a number to scale by, finite and not below 0: change it"
        for name, value in values.items()
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf
    ]


def nothing_in(**shapes: tuple[int, ...]) -> list[str]:
    """The problems of arrays, by name, that hold nothing: an empty batch, or a video of no frames."""
    return [f"{name}={shape} holds nothing: give at least one of each" for name, shape in shapes.items() if 0 in shape]
