"""An opened checkpoint: its manifest, checked, and reading of blocks on the host."""

import dataclasses as dc
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints.forms import as_stored
from shardzoo.checkpoints.grid import Block
from shardzoo.checkpoints.manifest import ASSETS, FORMAT, Json, Leaf, Manifest, decode, sha256, version_problem
from shardzoo.checkpoints.orbax_layout import CHECKPOINT_METADATA, DIGEST_FILE, MANIFEST_FILE, STAGING_SUFFIX
from shardzoo.checkpoints.stored import Reader
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.families import Family, config_from_json, find_family
from shardzoo.zoo.layout import fill, named


@dc.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, of which only the manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def family(self) -> Family:
        """The family of the model.

        Raises:
            InputError: this zoo has no such family.
        """
        return find_family(self.manifest.header.family)

    @property
    def config(self) -> Any:
        """The model's config, of the family's config type.

        Raises:
            InputError: no such family, or a config of another version.
        """
        return config_from_json(self.family.config, self.manifest.header.config)

    @property
    def declared(self) -> Any:
        """The declaration of the model, as its leaves are stored: their dtypes, quantized weights, adapters.

        Raises:
            InputError: no such family, or a config of another version.
        """
        leaves = self.manifest.leaves
        declared = as_stored(self.family.declare(self.config), {path: leaf.spec for path, leaf in leaves.items()})
        params = named(declared)
        typed = {p: dc.replace(q, dtype=leaves[p].spec.dtype) if p in leaves else q for p, q in params.items()}
        return fill(declared, typed)

    @property
    def assets(self) -> dict[str, Path]:
        """Small files carried along (config.json, tokenizer files): name -> path."""
        prefix = ASSETS + "/"
        return {n.removeprefix(prefix): self.path / n for n in self.manifest.files if n.startswith(prefix)}

    def read(self, path: str, at: Block | None = None) -> Shaped[np.ndarray, "..."]:
        """Values of a leaf (or of `carried/<source key>`) as stored: all of it, or the ranges `at`, one for each dim.

        Raises:
            InputError: no such leaf; a file that is missing or damaged.
        """
        leaf = self.leaf(path)
        at = tuple(slice(0, n) for n in leaf.spec.shape) if at is None else at
        stored = self._reader.open(self.path / leaf.folder, leaf.spec, leaf.grid).at(at)
        try:
            return stored.read().result()
        except (ValueError, OSError) as error:
            raise damage(path, error) from error

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader()

    def leaf(self, path: str) -> Leaf:
        """The manifest's entry of a leaf.

        Raises:
            InputError: there is none of this path.
        """
        try:
            return self.manifest.leaf(path)
        except KeyError:
            raise InputError(f"{self.path}: has no leaf {path!r}: `shardzoo inspect` lists them") from None


def damage(path: str, error: Exception) -> InputError:
    """A failed read as one line; its message holds the file and what is wrong with it."""
    return InputError(f"{path}: cannot be read ({str(error).splitlines()[0][:400]}): run `shardzoo verify`, then get"
                      " the checkpoint again")  # fmt: skip


def open(path: str | Path) -> Checkpoint:
    """Opens a checkpoint; reads its manifest and nothing else. Of a training run's folder, its last step.

    Raises:
        InputError: no checkpoint, an unfinished one, one that shardzoo did not write, one of a newer version, or a
            manifest that is damaged.
    """
    root = Path(path)
    if steps := finished_steps(root):
        root = root / str(steps[-1])
    _check_is_checkpoint(root)
    custom = _custom_metadata(root / CHECKPOINT_METADATA)
    try:
        data = (root / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{root / MANIFEST_FILE}: cannot be read ({error.strerror})") from error
    if sha256(data) != (_digest_beside(root) if custom.get("training") else custom.get("manifest_sha256")):
        raise InputError(f"{root / MANIFEST_FILE}: is damaged (its sha256 is not the one in {CHECKPOINT_METADATA}):"
                         " get the checkpoint again")  # fmt: skip
    manifest = decode(data, str(root / MANIFEST_FILE))
    if custom.get("family") != manifest.header.family:
        raise InputError(f"{root / CHECKPOINT_METADATA}: is damaged (family is not the manifest's)")
    return Checkpoint(root, manifest)


def finished_steps(folder: Path) -> list[int]:
    """The steps that a training run has saved in its folder, in order; empty where it is no such folder.

    A step's folder gets its plain number for a name once everything in it is written.
    """
    try:
        names = [name for name in os.listdir(folder) if name.isascii() and name.isdecimal()]
    except OSError:
        return []
    return sorted(int(n) for n in names if str(int(n)) == n and (folder / n / CHECKPOINT_METADATA).exists())


def _digest_beside(root: Path) -> str:
    """The manifest's digest in a training checkpoint, where Orbax writes the rest before the manifest is known."""
    try:
        return (root / DIGEST_FILE).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{root / DIGEST_FILE}: cannot be read ({error}): get the checkpoint again") from error


def _check_is_checkpoint(root: Path) -> None:
    problems: Iterable[str] = []
    if not root.is_dir():
        problems = ["there is no such folder" if not root.exists() else "is not a folder"]
    elif root.resolve().name.endswith(STAGING_SUFFIX):
        problems = ["is unfinished: run the command that was writing it again"]
    elif not (root / CHECKPOINT_METADATA).exists():
        theirs = any(root.glob("*.safetensors")) or any(root.glob("*.bin"))
        hint = "; it holds PyTorch's weights: `shardzoo convert` them first" if theirs else ""
        problems = [f"is not a checkpoint: it has no {CHECKPOINT_METADATA}{hint}"]
    fail_if(problems, str(root))


def _custom_metadata(path: Path) -> Json:
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is damaged (not JSON: {error}): get the checkpoint again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    custom = record.get("custom_metadata") if isinstance(record, dict) else None
    if not isinstance(custom, dict) or custom.get("format") != FORMAT:
        raise InputError(f"{path}: this Orbax checkpoint has no shardzoo manifest: convert its source with shardzoo")
    fail_if(version_problem(custom["format"], custom.get("version")), str(path))
    return custom
