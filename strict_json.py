"""JSON as its standard has it: UTF-8, no key twice in one object, no NaN or Infinity."""

import json
import math
from collections import Counter
from typing import Any

from shardzoo.errors import InputError


class _Duplicate(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _Duplicate(f"holds the key {twice[:100]!r} twice")
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises:
        InputError: anything else, said with `where` in front.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: is not UTF-8 (byte {error.start}): the file is damaged or of another format"
        ) from None
    except _Duplicate as error:
        raise InputError(f"{where}: {error}: the file is damaged or made to deceive") from None
    except (ValueError, RecursionError) as error:
        reason = "is nested too deep" if isinstance(error, RecursionError) else f"is not valid JSON ({error})"
        raise InputError(f"{where}: {reason}: the file is damaged or of another format") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: holds a {type(value).__name__} where an object is expected")
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float holds, which true and false are not."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False
