"""What a command is pointed at: a preset of the zoo, a checkpoint of ours, or a PyTorch source."""

import dataclasses
from pathlib import Path
from typing import Any

from shardzoo.cli.terminal import progress_bar
from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.families import FAMILIES, config_from_json, find_family, find_preset

HUB = "hf://"


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
    if path.exists():
        return _checkpoint(name, path) if is_checkpoint(path) else _source(name, path)
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


def _source(name: str, path: Path) -> Target:
    from shardzoo.convert.convert import plan_conversion

    found = plan_conversion(path)
    return Target(name, "source", found.family, found.declared)


def local_source(source: str) -> Path:
    """The folder or file of `source`; `hf://owner/name[@revision][/folder]` is downloaded first."""
    if not source.startswith(HUB):
        return Path(source).expanduser()
    from shardzoo.convert import hub

    with progress_bar("downloading") as progress:
        return hub.download(source, progress=progress)
