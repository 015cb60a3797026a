"""What a command is pointed at: a preset of the zoo, a checkpoint of ours, or a PyTorch source."""

import dataclasses
from pathlib import Path
from typing import Any

from shardzoo.convert.hub import is_hub_address
from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.families import FAMILIES, config_from_json, find_family, find_preset


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


def find_target(name: str) -> Target:
    """The model that `name` means.

    Raises:
        InputError: neither a path that is there nor a preset; or what is there cannot be used.
    """
    path = Path(name).expanduser()
    if is_hub_address(name) or (path.exists() and not is_checkpoint(path)):
        return _source(name)
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

    manifest = checkpoints.open(path).manifest
    return Target(name, "checkpoint", manifest.header.family, stored_declaration(manifest))


def stored_declaration(manifest: Any) -> Any:
    """The declaration of a checkpoint's model, with the dtypes in which it is stored."""
    family = find_family(manifest.header.family)
    declared = family.declare(config_from_json(family.config, manifest.header.config))
    stored = {path: leaf.spec.dtype for path, leaf in manifest.leaves.items()}
    params = layout.named(declared)
    typed = {path: dataclasses.replace(param, dtype=stored.get(path, param.dtype)) for path, param in params.items()}
    return layout.fill(declared, typed)


def _source(name: str) -> Target:
    from shardzoo.convert.convert import plan_conversion

    found = plan_conversion(name)
    return Target(name, "source", found.family, found.declared)
