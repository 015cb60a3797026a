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

import contextlib
import dataclasses as dc
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import sums
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec, plan_grid
from shardzoo.checkpoints.manifest import (
    ASSETS,
    CARRIED,
    OPT_STATE,
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
from shardzoo.checkpoints.shard_file import BAND
from shardzoo.checkpoints.staging import JOURNAL, Staging, listing, store_assets
from shardzoo.checkpoints.store import ENCODERS, Kept, LeafWriter, files_of, storage_error
from shardzoo.errors import InputError, fail_if

BUDGET = 128 << 20  # bytes in flight
Placed = dict[str, tuple[str, LeafSpec, Grid]]  # path -> folder, spec, grid
Finished = dict[str, tuple[str, tuple[Json, ...]]]  # path -> checksum, provenance


def carried_path(key: str) -> str:
    """The path under which the writer and `Checkpoint.read` know a source tensor that the model does not run."""
    return f"{CARRIED}/{key}"


def place_leaves(
    leaves: Mapping[str, LeafSpec],
    carried: Mapping[str, LeafSpec],
    opt_state: Mapping[str, LeafSpec] | None = None,
) -> Placed:
    """Folder, spec and grid of every leaf by path; `carried` and `opt_state` begin with these names and a slash.

    Raises:
        InputError: names that the tree or a file system cannot hold, dtypes that are not stored; all in one message.
    """
    trained = opt_state or {}
    problems = _name_problems(leaves) + _name_problems(trained) + _dtype_problems({**leaves, **carried, **trained})
    fail_if(problems, "leaves that cannot be stored")
    placed = {path: (f"{PARAMS}/{path}", spec, plan_grid(spec)) for path, spec in leaves.items()}
    for i, (key, spec) in enumerate(carried.items()):
        placed[carried_path(key)] = (f"{CARRIED}/t{i:05d}", spec, plan_grid(spec))
    return placed | {f"{OPT_STATE}/{p}": (f"{OPT_STATE}/{p}", spec, plan_grid(spec)) for p, spec in trained.items()}


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
        self._finished: Finished = {}
        self._kept: dict[str, Kept] = {}
        self.notes: dict[str, Json] = {}
        try:
            self._resume()
            self.done = frozenset(self._finished)
            self._require_space()
        except BaseException:
            self._staging.close()
            raise
        self._writer = LeafWriter(
            self._staging.root, self._placed, budget=budget, sync=sync, kept=self._kept, stored=self._note_block
        )

    def _require_space(self) -> None:
        """Refuses what does not fit, and leaves no folder behind unless an earlier run has begun it."""
        try:
            self._staging.require_space(self.nbytes - sum(n for n in listing(self._staging.root).values() if n > 0))
        except InputError:
            if not self._staging.journal.records:
                self._staging.journal.close()
                self._staging.discard()
            raise

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_) -> None:
        self.abort()

    def _resume(self) -> None:
        """Takes over the files that the journal lists and that are there whole, and removes everything else."""
        sizes = listing(self._staging.root)
        for record in self._staging.journal.records:
            if "note" in record:
                self.notes[record["note"]] = record["value"]
            elif "block" in record:
                self._keep_block(record, sizes)
            elif record["leaf"] in self._placed and self._is_whole(record["leaf"], sizes):
                self._finished[record["leaf"]] = (record["checksum"], tuple(record["from"]))
        keep = {JOURNAL}
        for path in self._finished:
            keep |= {f"{self._placed[path][0]}/zarr.json", *self._files(path, self.grid(path).indices())}
        for path, kept in self._kept.items():
            keep |= set(self._files(path, kept.files))
        for name in sizes.keys() - keep:
            (self._staging.root / name).unlink()

    def _keep_block(self, record: Json, sizes: Mapping[str, int]) -> None:
        path, at = record["block"], tuple(slice(start, stop) for start, stop in record["at"])
        if path not in self._placed:
            return
        indices = files_of(at, self.grid(path))
        kept = self._kept.setdefault(path, Kept())
        if indices & kept.files or any(sizes.get(n) != size for n, size in self._files(path, indices).items()):
            return
        kept.files |= indices
        kept.total = sums.add(kept.total, tuple(record["sums"]))

    def _note_block(self, path: str, at: Block, total: sums.Sums) -> None:
        self._log({"block": path, "at": [[s.start, s.stop] for s in at], "sums": list(total)})

    def _files(self, path: str, indices: Iterable[tuple[int, ...]]) -> dict[str, int]:
        """Name below the folder -> size of the leaf's files with these indices."""
        folder, spec, grid = self._placed[path]
        return {f"{folder}/{grid.file(i)}": grid.file_bytes(i, spec.dtype.itemsize) for i in indices}

    def _is_whole(self, path: str, sizes: Mapping[str, int]) -> bool:
        folder = self._placed[path][0]
        expected = self._files(path, self.grid(path).indices())
        found = {n: s for n, s in sizes.items() if n.startswith(folder + "/") and n != f"{folder}/zarr.json"}
        return expected == found and f"{folder}/zarr.json" in sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all data files of the whole checkpoint."""
        return stored_bytes(self._placed)

    @property
    def held(self) -> int:
        """Bytes of memory that it fills again and again, beside the values in flight."""
        return ENCODERS * BAND

    def grid(self, path: str) -> Grid:
        """How a leaf is cut; `grid(path).blocks()` are the ranges of its files."""
        return self._placed[path][2]

    def has(self, path: str, at: Block) -> bool:
        """Whether an earlier run stored this block, so that it need not be read and written again."""
        return path in self.done or self._writer.has(path, at)

    def write(
        self, path: str, at: Block, values: Shaped[np.ndarray, "..."], done: Callable[[], None] | None = None
    ) -> None:
        """Starts writing one block of whole files; waits only for room in the budget. A block that is there stays.

        `values` must stay as it is until `done` is called, by any thread, or `finish_leaf` returns. Safe to call from
        several threads.

        Raises:
            InputError: the storage is full, not writable, or failed, at this block or an earlier one.
            ValueError: the block is not made of whole files, was written before, or has another shape or dtype.
        """
        if not self.has(path, at):
            self._writer.write(path, at, values, done)
        elif done is not None:
            done()

    def finish_leaf(self, path: str, provenance: Iterable[Json] = ()) -> str:
        """Waits until the leaf is stored and notes it in the journal; returns its checksum.

        Raises:
            InputError: the storage is full, not writable, or failed.
            ValueError: not every file of the leaf was written.
        """
        total, written = self._writer.finish(path)
        lacking = [i for i in self.grid(path).indices() if i not in written]
        if lacking:
            raise ValueError(f"{path}: files {lacking[:4]} of {len(lacking)} were not written: write every block")
        checksum, origin = sums.text(total), list(provenance)
        self._log({"leaf": path, "checksum": checksum, "from": origin})
        self._finished[path] = (checksum, tuple(origin))
        return checksum

    def note(self, name: str, value: Json) -> None:
        """Keeps a JSON value for a later run of the same plan (`notes`)."""
        self._log({"note": name, "value": value})

    def _log(self, record: Json) -> None:
        try:
            self._staging.journal.add(record)
        except OSError as error:
            raise storage_error(str(self._staging.dst), error, self._staging.root) from error

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
        entries = store_assets(self._staging.root / ASSETS, self._assets, sync=self._sync)
        manifest = build_manifest(header, self._placed, self._finished, entries)
        return self._staging.publish(manifest, sync=self._sync)

    def abort(self) -> None:
        """Stops and lets go; what is written stays for a later run. Does nothing after `publish`."""
        self._writer.drain()
        if not self._staging.journal.closed:
            with contextlib.suppress(InputError):  # the caller has the first failure; a block not noted is redone
                self._writer.tell_stored()
        self._staging.journal.close()
        self._staging.close()

    def discard(self) -> None:
        """Stops and removes what is written."""
        self._writer.drain()
        self._staging.discard()


def build_manifest(
    header: ManifestHeader,
    placed: Placed,
    finished: Finished,
    assets: Mapping[str, FileEntry],
    training: Json | None = None,
) -> Manifest:
    """The manifest of a finished checkpoint, with every file that follows from its leaves."""
    made = {
        path: Leaf(spec=spec, grid=grid, folder=folder, checksum=finished[path][0], provenance=finished[path][1])
        for path, (folder, spec, grid) in placed.items()
    }
    aside = {i: {p[len(i) + 1 :]: x for p, x in made.items() if p.startswith(i + "/")} for i in (CARRIED, OPT_STATE)}
    manifest = Manifest(
        header=header,
        leaves={p: leaf for p, leaf in made.items() if not p.startswith((CARRIED + "/", OPT_STATE + "/"))},
        carried=aside[CARRIED],
        opt_state=aside[OPT_STATE],
        training=training,
        files={},
        producer=f"shardzoo {importlib.metadata.version('shardzoo')}",
    )
    files = {name: FileEntry(size=size) for leaf in made.values() for name, size in leaf.files().items()}
    files |= {n: FileEntry(size=len(d), sha256=sha256(d)) for n, d in metadata_files(manifest).items()}
    return dc.replace(manifest, files={**files, **assets})
