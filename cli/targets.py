"""What a command is pointed at: a preset of the zoo, a checkpoint of ours, or a PyTorch source."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardzoo.convert.hub import is_hub_address
from shardzoo.errors import InputError
from shardzoo.zoo.families import FAMILIES, find_preset


@dataclasses.dataclass(frozen=True)
class Target:
    """A model before any weight is read.

    Attributes:
        kind: "preset", "checkpoint" or "source".
        declared: the declaration, with the dtypes in which the weights are stored.
    """

    name: str
    kind: str
    family: str
    declared: Any


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint folder of Orbax, ours or not (which `checkpoints.open` then says)."""
    return (path / "_CHECKPOINT_METADATA").is_file() or (path / "_METADATA").is_file()


def find_target(name: str, **reading: Any) -> Target:
    """The model that `name` means; `reading` is how to read a PyTorch source, as `plan_conversion` takes it.

    Raises:
        InputError: neither a path that is there nor a preset; what is there cannot be used, or is no PyTorch source
            and `reading` is given.
    """
    path = Path(name).expanduser()
    if is_hub_address(name) or (path.exists() and not is_checkpoint(path)):
        return _source(name, reading)
    given = [f"--{option}" for option, value in reading.items() if value is not None]
    if given and (path.exists() or name.partition("/")[0] in FAMILIES):
        raise InputError(f"{name}: is no PyTorch source, which {', '.join(given)} would be for: leave them out")
    if path.exists():
        return _checkpoint(name, path)
    if name.partition("/")[0] not in FAMILIES:
        raise InputError(
            f"{name}: there is no such file or folder, and no preset of that name: check the path, or choose a preset"
            f" from `shardzoo presets` (families: {', '.join(sorted(FAMILIES))})"
        )
    family, config = find_preset(name)
    return Target(name, "preset", family.name, family.declare(config))


def _checkpoint(name: str, path: Path) -> Target:
    from shardzoo import checkpoints

    found = checkpoints.open(path)
    return Target(name, "checkpoint", found.manifest.header.family, found.declared)


def _source(name: str, reading: Mapping[str, Any]) -> Target:
    from shardzoo.convert.convert import plan_conversion

    found = plan_conversion(name, **reading)
    return Target(name, "source", found.family, found.declared)
