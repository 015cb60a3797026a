"""Checks of the fields of a config.json that families share."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardzoo.strict_json import is_number

MOST = 2**48  # that a size or a ratio is


def malformed(source: Mapping[str, Any], *, whole: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[str]:
    """What is wrong with the fields named, where they are there and not null.

    Args:
        source: the parsed config.
        whole: fields that hold whole numbers of at least 1.
        numbers: fields that hold finite numbers.
    """
    whole = tuple(whole)
    problems = [
        f"{name}={source[name]!r} is not a whole number of at least 1"
        for name in whole
        if source.get(name) is not None and not (type(source[name]) is int and source[name] >= 1)
    ]
    problems += too_large({name: source.get(name) for name in whole})
    return problems + [
        f"{name}={source[name]!r} is not a number"
        for name in numbers
        if source.get(name) is not None and not is_number(source[name])
    ]


def too_large(sizes: Mapping[str, Any]) -> list[str]:
    """Sizes that nothing has, whose products floats might not hold."""
    return [
        f"{name}={size} is beyond any size: correct it"
        for name, size in sizes.items()
        if type(size) in (int, float) and abs(size) > MOST
    ]
