"""One step of a training run on its way to disk: a copy taken at once, and its files written in the background.

Orbax's checkpointer makes the unfinished folder, waits for all processes, and gives the folder its name; what is in it
is written here, in the format of every other checkpoint of this project: chunks that carry their checksums and follow
the declared splits, and the manifest.
"""

import dataclasses as dc
import functools
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped
from orbax.checkpoint import v1 as ocp

from shardzoo.checkpoints import distributed, snapshot
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec, also_at_rest
from shardzoo.checkpoints.manifest import (
    ASSETS,
    CARRIED,
    FORMAT,
    MANIFEST,
    OPT_STATE,
    PARAMS,
    VERSION,
    Json,
    ManifestHeader,
    sha256,
)
from shardzoo.checkpoints.orbax_layout import (
    DIGEST_FILE,
    MANIFEST_FILE,
    MARKS_FILE,
    STAGING_SUFFIX,
    marks,
    marks_file,
    metadata_files,
)
from shardzoo.checkpoints.save import provenance_of, put_together, unit_of_processes
from shardzoo.checkpoints.staging import listing, store_assets
from shardzoo.checkpoints.store import LeafWriter, storage_error, write_file
from shardzoo.checkpoints.writer import Placed, build_manifest, place_leaves
from shardzoo.errors import InputError
from shardzoo.zoo.layout import named

LANE = "save"  # of what the processes tell each other in the background
TREES = (PARAMS, OPT_STATE, CARRIED)  # items of arrays
LEAST_BUDGET = 8 << 20  # bytes in flight, of blocks put together out of several shards


@dc.dataclass(kw_only=True)
class Job:
    """Everything that the background needs of one step.

    Attributes:
        taken: path (of the optimizer's state, `opt_state/<path>`) -> what this process writes of it; emptied as it is
            written, so that memory comes back early.
        source: what the run began from; its tensors that no model runs are read there, by the first process.
    """

    placed: Placed
    taken: dict[str, snapshot.Snapshot]
    header: ManifestHeader
    training: Json
    source: Checkpoint | None
    assets: Mapping[str, Path | bytes]
    sync: bool
    timeout: float | int

    @property
    def name(self) -> str:
        return f"save step {self.training['step']}"

    def write(self, folders: Mapping[str, Path]) -> None:
        """Writes this process's part into the folders of the items; the first process adds the manifest at the end.

        Raises:
            InputError: the storage is full or failed on any process; on every process alike.
            distributed.ProcessTimeout: a process died or fell behind.
        """
        mine, problem = self._write_mine(folders)
        parts = distributed.share(self.name, [mine, problem], timeout=self.timeout, lane=LANE)
        distributed.fail_together(self.name, [text for _, text in parts])
        first = jax.process_index() == 0
        problem = self._write_manifest(folders, [done for done, _ in parts]) if first else None
        distributed.agree(self.name, problem, timeout=self.timeout, lane=LANE)

    def _write_mine(self, folders: Mapping[str, Path]) -> tuple[dict[str, Json], str | None]:
        """Checksum and number of files of each leaf that this process wrote, and what went wrong."""
        first, done = jax.process_index() == 0, {}
        held = sum(taken.nbytes for taken in self.taken.values())
        root = folders[MANIFEST].parent
        placed = {
            path: (str(_lies(folder, folders).relative_to(root)), spec, grid)
            for path, (folder, spec, grid) in self.placed.items()
        }
        writer = LeafWriter(root, placed, budget=max(LEAST_BUDGET, held // 16), sync=self.sync)
        try:
            for path, (_, _, grid) in self.placed.items():
                blocks = self._blocks(path, grid)
                if blocks or first:
                    writer.begin(path, metadata=first)
                    for at, values in blocks:
                        writer.write(path, at, values())
                    total, written = writer.finish(path)
                    done[path] = {"sums": total, "files": len(written)}
                del blocks
                self.taken.pop(path, None)
            writer.settle()
        except InputError as error:
            return done, str(error)
        except OSError as error:
            return done, str(storage_error("save", error, root))
        finally:
            writer.drain()
        return done, None

    def _blocks(self, path: str, grid: Grid) -> list[tuple[Block, Callable[[], Shaped[np.ndarray, "..."]]]]:
        """The files of a leaf that this process writes, each with what gives its values."""
        if path in self.taken:
            return self.taken[path].blocks(grid)
        if jax.process_index() != 0:
            return []
        assert self.source is not None  # what is not of the run is carried over from it
        return [(at, functools.partial(self.source.read, path, at)) for at in grid.blocks()]

    def _write_manifest(self, folders: Mapping[str, Path], parts: list[Json]) -> str | None:
        """Writes what says what the files are; returns what went wrong."""
        finished, problem = put_together(self.placed, parts, provenance_of(self.source))
        if problem:
            return problem
        try:
            assets = store_assets(_lies(ASSETS, folders), self.assets, sync=self.sync)
            manifest = build_manifest(self.header, self.placed, finished, assets, self.training)
            encoded = manifest.encode()
            files = {n: data for n, data in metadata_files(manifest).items() if not n.endswith("zarr.json")}
            files |= {MANIFEST_FILE: encoded, DIGEST_FILE: sha256(encoded).encode()}
            for name, data in files.items():
                write_file(_lies(name, folders), data, sync=self.sync)
        except InputError as error:
            return str(error)
        except OSError as error:
            return str(storage_error("save", error, folders[MANIFEST]))
        return None


def seal(step: Path, *, sync: bool) -> None:
    """Adds to a finished step the digests of what Orbax has written into it, so that `verify` finds damage there too.

    A step without them, of a run that was killed here or where the storage was full, is whole as well.
    """
    names = marks(listing(step))
    unfinished = step.with_name(f"{step.name}.marks{STAGING_SUFFIX}")
    try:
        digests = {name: sha256((step / name).read_bytes()) for name in names}
        unfinished.mkdir(exist_ok=True)
        write_file(unfinished / "marks", marks_file(digests), sync=sync)
        os.replace(unfinished / "marks", step / MARKS_FILE)
    except OSError:
        pass
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _lies(name: str, folders: Mapping[str, Path]) -> Path:
    """Where a file of the checkpoint lies while it is unfinished: Orbax renames the folder of each item at the end."""
    item, _, rest = name.partition("/")
    return folders[item] / rest


def place(
    declared: Any, declared_state: Any, leaves: Mapping[str, Array], carried: Mapping[str, LeafSpec] | None = None
) -> Placed:
    """Folder, spec and grid of every leaf of model and optimizer, cut for splits at rest too, and of `carried` tensors.

    With several processes, no file is of two of them.
    """
    params, state = named(declared), named(declared_state)
    specs = {p: dc.replace(LeafSpec.of(q), dtype=np.dtype(leaves[p].dtype)) for p, q in params.items()}
    of_state = {
        p: dc.replace(LeafSpec.of(q), dtype=np.dtype(leaves[f"{OPT_STATE}/{p}"].dtype)) for p, q in state.items()
    }
    rest = {**params, **{f"{OPT_STATE}/{p}": q for p, q in state.items()}}
    placed = place_leaves(specs, carried or {}, of_state)
    for path, leaf in leaves.items():
        folder, spec, grid = placed[path]
        grid = also_at_rest(grid, spec, rest[path].rest)
        placed[path] = (folder, spec, grid if jax.process_count() == 1 else grid.within(unit_of_processes(leaf)))
    return placed


@dc.dataclass(frozen=True)
class _Item:
    """Stands for one item of the checkpoint; `job` is with the manifest's, whose background writes all of them."""

    job: Job | None = None


class _Handler:
    """Writes an `_Item`; Orbax notes the handler's name as that of who reads the item."""

    async def save(self, directory: Any, checkpointable: _Item) -> Awaitable[None]:
        return _write(checkpointable.job, directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        raise NotImplementedError(f"{directory}: is read by shardzoo.checkpoints, or by Orbax's own handler")

    async def metadata(self, directory: Any) -> Any:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, _Item)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return False


class _Tree(_Handler):
    """Of a tree of arrays: plain Orbax reads it as its own."""

    __module__, __qualname__ = ocp.handlers.PyTreeHandler.__module__, ocp.handlers.PyTreeHandler.__qualname__


class _Json(_Handler):
    """Of the manifest."""

    __module__, __qualname__ = ocp.handlers.JsonHandler.__module__, ocp.handlers.JsonHandler.__qualname__


async def _write(job: Job | None, directory: Any) -> None:
    if job is None:
        return
    folder = Path(await directory.await_creation())  # with those of the other items, which are named in the same way
    suffix = folder.name.removeprefix(MANIFEST)
    with jax.set_mesh(None):  # work on single devices is refused under the caller's mesh
        job.write({item: folder.with_name(item + suffix) for item in (*TREES, MANIFEST)})


def _is_news(record: logging.LogRecord) -> bool:
    """Whether Orbax's log says what `Training.wait` does not: it writes the trace of each thread that saw our error."""
    return not (record.exc_info and isinstance(record.exc_info[1], InputError | distributed.ProcessTimeout))


def checkpointer(folder: Path, timeout: float | int) -> ocp.training.Checkpointer:
    """Orbax's checkpointer of a run; which steps stay is decided by the run."""
    logging.getLogger("absl").addFilter(_is_news)
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(1, round(timeout))
    registry = ocp.handlers.local_registry()
    for name in TREES:
        registry.add(_Tree, checkpointable_name=name)
    context.checkpointables.registry = registry.add(_Json, checkpointable_name=MANIFEST)
    return ocp.training.Checkpointer(folder, context=context)


def start(checkpointer: ocp.training.Checkpointer, step: int, job: Job) -> Any:
    """Begins one save; returns Orbax's handle of it."""
    about = {"format": FORMAT, "version": VERSION, "family": job.header.family, "training": True}
    names = {folder.partition("/")[0] for folder, _, _ in job.placed.values()}
    items = {name: _Item() for name in TREES if name in names} | {MANIFEST: _Item(job)}
    return checkpointer.save_checkpointables_async(step, items, force=True, custom_metadata=about)
