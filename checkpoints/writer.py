"""Writing a checkpoint leaf by leaf in bounded memory: what the converter streams into.

    with CheckpointWriter(dst, header, leaves, plan_hash) as writer:
        for path in leaves:
            if path not in writer.done:
                for block in writer.grid(path).blocks():
                    writer.write(path, block, values_of(path, block))
                writer.finish_leaf(path, provenance)
        writer.publish()

Killed at any point it leaves a folder that no reader takes for a checkpoint, and a run with the same plan carries on.
"""

import dataclasses as dc
import importlib.metadata
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import checksum
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec, plan_grid
from shardzoo.checkpoints.manifest import (
    CARRIED,
    PARAMS,
    STORED,
    FileEntry,
    Json,
    Leaf,
    Manifest,
    ManifestHeader,
    Source,
    sha256,
)
from shardzoo.checkpoints.orbax_layout import metadata_files
from shardzoo.checkpoints.staging import JOURNAL, LOCK, Staging, listing, store_assets
from shardzoo.checkpoints.store import LeafWriter
from shardzoo.errors import fail_if

BUDGET = 128 << 20  # bytes in flight
Placed = dict[str, tuple[str, LeafSpec, Grid]]


def carried_path(key: str) -> str:
    """The path under which the writer and `Checkpoint.read` know a source tensor that the model does not run."""
    return f"{CARRIED}/{key}"


def place_leaves(leaves: Mapping[str, LeafSpec], carried: Mapping[str, LeafSpec]) -> Placed:
    """Folder, spec and grid of every leaf by path.

    Raises:
        InputError: names that the tree or a file system cannot hold, dtypes that are not stored; all in one message.
    """
    fail_if(_name_problems(leaves) + _dtype_problems({**leaves, **carried}), "leaves that cannot be stored")
    placed = {path: (f"{PARAMS}/{path}", spec, plan_grid(spec)) for path, spec in leaves.items()}
    for i, (key, spec) in enumerate(carried.items()):
        placed[carried_path(key)] = (f"{CARRIED}/t{i:05d}", spec, plan_grid(spec))
    return placed


def _name_problems(paths: Iterable[str]) -> list[str]:
    """Orbax joins names by dots into folders, so a leaf and a branch of the same name would overwrite each other."""
    paths = set(paths)
    problems = [
        f"{path!r}: is not names of letters, digits, '_' and '-' joined by dots, of 200 characters at most"
        for path in sorted(paths)
        if len(path) > 200 or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path, re.ASCII)
    ]
    for path in sorted(paths):
        parts = path.split(".")
        above = [".".join(parts[:i]) for i in range(1, len(parts))]
        problems += [f"{path}: {name!r} is a leaf too" for name in above if name in paths]
    return problems


def _dtype_problems(leaves: Mapping[str, LeafSpec]) -> list[str]:
    return [
        f"{path}: dtype={spec.dtype.name} is not stored in checkpoints: convert it to one of {', '.join(STORED)}"
        for path, spec in leaves.items()
        if spec.dtype.name not in STORED
    ]


def stored_bytes(placed: Placed) -> int:
    """Bytes of all data files."""
    return sum(
        grid.file_bytes(index, spec.dtype.itemsize) for _, spec, grid in placed.values() for index in grid.indices()
    )


class CheckpointWriter:
    """Writes one checkpoint; a context manager that lets go of it on the way out, published or not.

    Args:
        dst: where the checkpoint will be; must not exist.
        header: what the manifest says apart from leaves; `publish` may replace its sources.
        leaves: parameters by path ("blocks.attn.q.weight").
        plan_hash: names the work: an unfinished run with the same one is carried on, any other is started again.
        carried: source tensors that the model does not run, by source key; their path here is `carried_path(key)`.
        assets: small files to carry along (name -> file or bytes).
        budget: bytes in flight; peak memory is this plus what the caller holds.
        sync: flush every file to the device, for storage that must survive loss of power.
        restart: start again even if an unfinished run has the same plan.

    Attributes:
        done: paths found whole from an earlier run.
        notes: what an earlier run left with `note`.

    Raises:
        InputError: names or dtypes that cannot be stored; a destination that exists, is not writable, too small, or
            being written by another process.
    """

    def __init__(
        self,
        dst: str | Path,
        header: ManifestHeader,
        leaves: Mapping[str, LeafSpec],
        plan_hash: str,
        *,
        carried: Mapping[str, LeafSpec] | None = None,
        assets: Mapping[str, Path | bytes] | None = None,
        budget: int = BUDGET,
        sync: bool = True,
        restart: bool = False,
    ):
        self.header = header
        self._placed = place_leaves(leaves, carried or {})
        self._assets = dict(assets or {})
        self._sync = sync
        self._staging = Staging(Path(dst), sha256(plan_hash.encode()), restart=restart)
        self._finished: dict[str, tuple[str, tuple[Json, ...]]] = {}
        self.notes: dict[str, Json] = {}
        try:
            self._resume()
            self.done = frozenset(self._finished)
            left = {path: p for path, p in self._placed.items() if path not in self.done}
            self._staging.require_space(stored_bytes(left))
        except BaseException:
            self._staging.close()
            raise
        self._writer = LeafWriter(self._staging.root, self._placed, budget=budget, sync=sync)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_) -> None:
        self.abort()

    def _resume(self) -> None:
        """Takes over the leaves whose files are all there, and removes everything else."""
        sizes = listing(self._staging.root)
        for record in self._staging.journal.records:
            if "note" in record:
                self.notes[record["note"]] = record["value"]
            elif record["leaf"] in self._placed and self._is_whole(record["leaf"], sizes):
                self._finished[record["leaf"]] = (record["checksum"], tuple(record["from"]))
        keep = {self._placed[path][0] for path in self._finished}
        for name in sizes:
            folder = "/".join(name.split("/")[:2])
            target = self._staging.root / folder
            if folder not in keep and name not in (JOURNAL, LOCK) and target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()

    def _is_whole(self, path: str, sizes: Mapping[str, int]) -> bool:
        folder, spec, grid = self._placed[path]
        expected = {f"{folder}/{grid.file(i)}": grid.file_bytes(i, spec.dtype.itemsize) for i in grid.indices()}
        found = {n: s for n, s in sizes.items() if n.startswith(folder + "/") and n != f"{folder}/zarr.json"}
        return expected == found and f"{folder}/zarr.json" in sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all data files of the whole checkpoint."""
        return stored_bytes(self._placed)

    def grid(self, path: str) -> Grid:
        """How a leaf is cut; `grid(path).blocks()` are the ranges of its files."""
        return self._placed[path][2]

    def write(self, path: str, at: Block, values: Shaped[np.ndarray, "..."]) -> None:
        """Starts writing one block of whole files; waits only for room in the budget.

        `values` must stay as it is until `finish_leaf` returns. Safe to call from several threads.

        Raises:
            ValueError: the block is not made of whole files, was written before, or has another shape or dtype.
        """
        self._writer.write(path, at, values)

    def finish_leaf(self, path: str, provenance: Iterable[Json] = ()) -> str:
        """Waits until the leaf is stored and notes it in the journal; returns its checksum.

        Raises:
            InputError: the storage is full, not writable, or failed.
            ValueError: not every file of the leaf was written.
        """
        sums, written = self._writer.finish(path)
        lacking = [i for i in self.grid(path).indices() if i not in written]
        if lacking:
            raise ValueError(f"{path}: files {lacking[:4]} of {len(lacking)} were not written: write every block")
        record = {"leaf": path, "checksum": checksum.text(sums), "from": list(provenance)}
        self._staging.journal.add(record)
        self._finished[path] = (record["checksum"], tuple(record["from"]))
        return record["checksum"]

    def note(self, name: str, value: Json) -> None:
        """Keeps a JSON value for a later run of the same plan (`notes`)."""
        self._staging.journal.add({"note": name, "value": value})

    def publish(self, sources: Iterable[Source] | None = None) -> Path:
        """Writes manifest and metadata and gives the checkpoint its name, in that order; returns the name.

        Raises:
            InputError: the storage failed, or the destination has come into being meanwhile.
            ValueError: a leaf is not finished.
        """
        lacking = [path for path in self._placed if path not in self._finished]
        if lacking:
            raise ValueError(f"{self._staging.dst}: leaves {lacking[:4]} of {len(lacking)} are not finished")
        header = self.header if sources is None else dc.replace(self.header, sources=tuple(sources))
        entries = store_assets(self._staging.root, self._assets, sync=self._sync)
        manifest = build_manifest(header, self._placed, self._finished, entries)
        return self._staging.publish(manifest, sync=self._sync)

    def abort(self) -> None:
        """Stops and lets go; what is written stays for a later run. Does nothing after `publish`."""
        self._writer.drain()
        self._staging.journal.close()
        self._staging.close()

    def discard(self) -> None:
        """Stops and removes what is written."""
        self._writer.drain()
        self._staging.discard()


def build_manifest(
    header: ManifestHeader,
    placed: Placed,
    finished: Mapping[str, tuple[str, tuple[Json, ...]]],
    assets: Mapping[str, FileEntry],
) -> Manifest:
    """The manifest of a finished checkpoint, with every file that follows from its leaves."""
    made = {
        path: Leaf(spec=spec, grid=grid, folder=folder, checksum=finished[path][0], provenance=finished[path][1])
        for path, (folder, spec, grid) in placed.items()
    }
    manifest = Manifest(
        header=header,
        leaves={p: leaf for p, leaf in made.items() if not p.startswith(CARRIED + "/")},
        carried={p.removeprefix(CARRIED + "/"): leaf for p, leaf in made.items() if p.startswith(CARRIED + "/")},
        files={},
        producer=f"shardzoo {importlib.metadata.version('shardzoo')}",
    )
    files = {name: FileEntry(size=size) for leaf in made.values() for name, size in leaf.files().items()}
    files |= {n: FileEntry(size=len(d), sha256=sha256(d)) for n, d in metadata_files(manifest).items()}
    return dc.replace(manifest, files={**files, **assets})
