"""Values of options: meshes, dtypes and byte sizes, from what a user types.

A value that cannot be read at all is wrong usage (exit status 2); one that reads well and does not fit the model is a
problem with the input (exit status 1) and is found later.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import typer

from shardzoo.errors import InputError

DEGREES = ("data", "pipe", "context", "tensor")
AT_REST = ("data", "context")  # what weights may be split over while they are not used
UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_mesh(text: str) -> Any:
    """`context=2,tensor=4` as degrees; `one` or an empty text is a single device (`Degrees`)."""
    from shardzoo.zoo.mesh import Degrees

    given: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")) if text.strip() != "one" else ():
        name, _, value = part.partition("=")
        if name not in DEGREES or not value.isdecimal() or name in given:
            raise typer.BadParameter(
                f"{part!r} in {text!r} is not one of {', '.join(DEGREES)} with a whole number, each given once:"
                " write for example context=2,tensor=4"
            )
        given[name] = int(value)
    try:
        return Degrees(**given)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


def parse_dtype(text: str) -> np.dtype:
    """A floating-point dtype by its name or a usual short form of it."""
    from shardzoo.convert import plan

    try:
        dtype = plan.parse_dtype(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    return np.dtype(dtype)


def parse_quantize(text: str) -> str:
    """What weights are quantized to."""
    if text not in ("int8", "fp8"):
        raise typer.BadParameter(f"{text!r} is not one of int8, fp8")
    return text


def parse_at_rest(text: str) -> str:
    """The axis that weights are split over at rest."""
    if text not in AT_REST:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(AT_REST)}")
    return text


def parse_lora(text: str) -> Any:
    """`style.safetensors=0.8`, `transformer_2:low.safetensors` or a plain path (`Lora`)."""
    from shardzoo.cli.weights import Lora

    path, weight, component = text, 1.0, None
    before, equals, after = text.rpartition("=")
    if equals and not Path(text).exists():
        try:
            path, weight = before, float(after)
        except ValueError:
            raise typer.BadParameter(f"{after!r} in {text!r} is not a number: write FILE=0.8") from None
    part, colon, rest = path.partition(":")
    if colon and re.fullmatch(r"\w+", part) and not Path(path).exists():
        path, component = rest, part
    if not path or not math.isfinite(weight):
        raise typer.BadParameter(f"{text!r} is not a file and a finite weight: write for example style.safetensors=0.8")
    return Lora(path=Path(path), strength=weight, component=component)


def parse_bytes(text: str) -> int:
    """A number of bytes: `400MiB`, `2GB`, `1.5 GiB` or plain digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a size: write for example 400MiB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])
