"""Saving a live, sharded model from one process or several, in the format that the converter writes.

Each process writes the files of the shards it owns; a file never crosses from one process's shards to another's. The
first process holds the lock, gathers checksums through the coordination service, and publishes when all are done.
"""

import dataclasses as dc
import functools
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from shardzoo.checkpoints import distributed, pages, sums
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.forms import whole_path
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec
from shardzoo.checkpoints.manifest import ASSETS, Json, ManifestHeader, sha256
from shardzoo.checkpoints.staging import Staging, store_assets
from shardzoo.checkpoints.store import LeafWriter, storage_error
from shardzoo.checkpoints.writer import (
    BUDGET,
    Finished,
    Placed,
    build_manifest,
    carried_path,
    place_leaves,
    stored_bytes,
)
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.adapters import names as adapter_names
from shardzoo.zoo.families import FAMILIES, config_changes, config_to_json
from shardzoo.zoo.layout import HOST, named
from shardzoo.zoo.quantize import kind_of

FORMS = ("quantized", "adapters")  # what a header's detail says of the weights' forms


def save(
    path: str | Path,
    model: Any,
    declared: Any,
    *,
    source: Checkpoint | None = None,
    header: ManifestHeader | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    budget: int = BUDGET,
    sync: bool = True,
    timeout: float = distributed.TIMEOUT,
) -> Path:
    """Writes a live model to a new checkpoint; called by every process of its mesh, on a file system they all see.

    Args:
        path: the checkpoint; must not exist.
        model: the live module, of any mesh; its leaves keep their dtypes.
        declared: its declaration.
        source: the checkpoint it was restored from; its provenance, carried tensors and assets go along, so that the
            model can still be exported to the layout it came in.
        header: what the manifest says of it, where it is neither of `source` nor of a registered family.
        assets: small files to carry along, besides those of `source`.
        budget: bytes in flight in each process.
        sync: flush every file to the device, for storage that must survive loss of power.
        timeout: seconds that processes wait for each other at every step.

    Raises:
        InputError: a model that is not of the declaration; a destination that exists, is full or not writable; a file
            system that not every process sees. On every process alike, with nothing left behind.
        distributed.ProcessTimeout: a process died or fell behind.
    """
    dst = Path(path)
    with distributed.together("save", dst, timeout=timeout) as alike:
        leaves = live_leaves(model, declared)
        header = header or header_of(model, declared, source)
        aside = source.manifest.carried if source else {}
        placed = _place(leaves, declared, {key: leaf.spec for key, leaf in aside.items()})
        alike["the path"] = str(dst)
    token = distributed.share("save", uuid.uuid4().hex, timeout=timeout)[0]
    staging, root = _stage(dst, token, placed, timeout)
    try:
        writer = LeafWriter(root, placed, budget=budget, sync=sync)
        try:
            with jax.set_mesh(None):  # work on single devices is refused under the caller's mesh
                mine, problem = _write_mine(writer, placed, leaves, source)
        finally:
            writer.drain()
        parts = distributed.share("save: written", mine, timeout=timeout)
        distributed.agree("save", problem, at=dst, timeout=timeout)
        problem = None
        if staging:
            finished, problem = put_together(placed, parts, provenance_of(source))
            problem = problem or _publish(staging, placed, finished, header, _assets(source, assets), sync)
        distributed.agree("save", problem, at=dst, timeout=timeout)
    finally:
        if staging:
            staging.discard()
    return dst


def live_leaves(model: Any, declared: Any, what: str = "model") -> dict[str, Array]:
    """Path -> array of a live tree, checked against its declaration."""
    params, leaves = named(declared), named(model)
    problems = [f"{p}: declared, but the {what} has none" for p in params if p not in leaves]
    problems += [f"{p}: in the {what}, but not declared" for p in leaves if p not in params]
    for path, param in params.items():
        leaf = leaves.get(path)
        if leaf is not None and not isinstance(leaf, jax.Array):
            problems.append(f"{path}: is {type(leaf).__name__}, not a jax array: restore or place the {what} first")
        elif leaf is not None and leaf.shape != tuple(param.shape):
            problems.append(f"{path}: has shape {list(leaf.shape)}, declared {list(param.shape)}")
    fail_if(problems, f"save: the {what} is not of its declaration")
    return leaves


def header_of(model: Any, declared: Any, source: Checkpoint | None) -> ManifestHeader:
    """The header of the source, whose files no longer hold these values, or one made from the model's config.

    Raises:
        InputError: a model of no family; one with another config than its source, whose config.json would go along.
    """
    kind, names = kind_of(declared), adapter_names(declared)
    forms = {**({"quantized": kind} if kind else {}), **({"adapters": names} if names else {})}
    config = getattr(model, "config", None)
    if source is not None:
        family = FAMILIES.get(source.manifest.header.family)
        known = family is not None and type(config) is family.config
        changes = config_changes(source.config, config) if known else []
        fail_if(
            [f"{change}: leave out source=, or undo that" for change in changes],
            f"save: model.config is not that of its source, {source.path}",
        )
        sources = tuple(dc.replace(s, sha256=None) for s in source.manifest.header.sources)
        came = {name: value for name, value in source.manifest.header.detail.items() if name not in FORMS}
        return dc.replace(source.manifest.header, sources=sources, detail=came | forms)
    family = next((f for f in FAMILIES.values() if f.config is type(config)), None)
    if family is None:
        raise InputError(f"save: model.config is {type(config).__name__}, of no registered family: pass header=")
    return ManifestHeader(family=family.name, config=config_to_json(config), detail=forms)


def _place(leaves: Mapping[str, Array], declared: Any, carried: Mapping[str, LeafSpec]) -> Placed:
    """Folder, spec and grid of every leaf; with several processes, no file is of two of them."""
    params = named(declared)
    specs = {p: dc.replace(LeafSpec.of(params[p]), dtype=np.dtype(a.dtype)) for p, a in leaves.items()}
    placed = place_leaves(specs, carried)
    if jax.process_count() > 1:
        for path, leaf in leaves.items():
            folder, spec, grid = placed[path]
            placed[path] = (folder, spec, grid.within(unit_of_processes(leaf)))
    return placed


def _stage(dst: Path, token: str, placed: Placed, timeout: float) -> tuple[Staging | None, Path]:
    """The staging folder, made and locked by the first process and seen by all."""
    staging, root, problem = None, "", None
    if jax.process_index() == 0:
        try:
            staging = Staging(dst, sha256(token.encode()), restart=True)
            staging.require_space(stored_bytes(placed))
            root = str(staging.root)
        except InputError as error:
            problem = str(error)
    try:
        distributed.agree("save", problem, at=dst, timeout=timeout)
        root = distributed.share("save: folder", root, timeout=timeout)[0]
        seen = Path(root).is_dir()
        lost = None if seen else f"{root}: not seen here: save to a file system that every process shares"
        distributed.agree("save", lost, at=dst, timeout=timeout)
    except BaseException:
        if staging:
            staging.discard()
        raise
    return staging, Path(root)


def _write_mine(
    writer: LeafWriter, placed: Placed, leaves: Mapping[str, Array], source: Checkpoint | None
) -> tuple[dict[str, Json], str | None]:
    """Writes this process's files; returns checksum and number of files of each leaf, and what went wrong."""
    first = jax.process_index() == 0
    done: dict[str, Json] = {}
    try:
        for path, (_, _, grid) in placed.items():
            blocks = _my_blocks(path, grid, leaves, source, first)
            if blocks or first:
                writer.begin(path, metadata=first)
                for at, values in blocks:
                    writer.write(path, at, values())
                total, written = writer.finish(path)
                done[path] = {"sums": total, "files": len(written)}
        writer.settle()
    except InputError as error:
        return done, str(error)
    except OSError as error:
        return done, str(storage_error("save", error, writer.root))
    return done, None


def _my_blocks(path: str, grid: Grid, leaves: Mapping[str, Array], source: Checkpoint | None, first: bool) -> list:
    """The blocks of a leaf that this process writes, each with a function that gives its values."""
    if path in leaves:
        leaf = leaves[path]
        mine = owned(leaf)
        blocks = [at for at in grid.blocks() if any(overlap(at, region) for region in mine)]
        if jax.process_count() == 1:
            blocks = list(grid.blocks())
        shards = {ranges(s.index, leaf.shape): s.data for s in leaf.addressable_shards}
        return [(at, functools.partial(gather, shards, np.dtype(leaf.dtype), at)) for at in blocks]
    if not first:
        return []
    assert source is not None  # what is not a live leaf is carried over from it
    return [(at, functools.partial(source.read, path, at)) for at in grid.blocks()]


def owned(leaf: Array) -> list[Block]:
    """The distinct regions of a leaf whose first device, in the sharding's order, belongs to this process."""
    me = jax.process_index()
    return [tuple(slice(*r) for r in region) for region, process in _owners(leaf).items() if process == me]


def _owners(leaf: Array) -> dict[tuple[tuple[int, int], ...], int]:
    """Region -> the process of its first device."""
    owner: dict[tuple, jax.Device] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        owner.setdefault(ranges(index, leaf.shape), device)
    return {region: device.process_index for region, device in owner.items()}


def unit_of_processes(leaf: Array) -> tuple[int, ...]:
    """The largest block whose multiples each lie in regions of one process: several shards of its devices, if it can.

    Every file costs the storage a wait, so a process does not write one for each of its devices.
    """
    return _unit(leaf.shape, leaf.sharding.shard_shape(leaf.shape), _owners(leaf))


def _unit(shape: tuple[int, ...], shard: tuple[int, ...], owners: Mapping[tuple, int]) -> tuple[int, ...]:
    """That block, where `owners` tells the process of each region of this shape of shards."""
    unit = [max(1, n) for n in shard]
    grid = np.zeros([-(-n // u) for n, u in zip(shape, unit, strict=True)], np.int64)
    for region, process in owners.items():
        if grid.size:
            grid[tuple(start // u for (start, _), u in zip(region, unit, strict=True))] = process
    for d in reversed(range(grid.ndim if grid.size else 0)):
        for k in range(grid.shape[d], 1, -1):
            if grid.shape[d] % k:
                continue
            groups = grid.reshape(*grid.shape[:d], -1, k, *grid.shape[d + 1 :])
            first = groups.take([0], axis=d + 1)
            if (groups == first).all():
                grid, unit[d] = first.squeeze(d + 1), unit[d] * k
                break
    return tuple(unit)


def ranges(index: Block, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))


def overlap(at: Block, region: Block) -> bool:
    return all(max(r.start, s.start) < min(r.stop, s.stop) for s, r in zip(at, region, strict=True))


def gather(
    shards: Mapping[tuple[tuple[int, int], ...], Array | Shaped[np.ndarray, "..."]], dtype: np.dtype, at: Block
) -> Shaped[np.ndarray, "..."]:
    """One block of a leaf on the host, out of the shards (by their ranges) that this process has."""
    whole = pages.empty([s.stop - s.start for s in at], dtype)
    for region, data in shards.items():
        both = [(max(s.start, a), min(s.stop, b)) for s, (a, b) in zip(at, region, strict=True)]
        if any(a >= b for a, b in both):
            continue
        within = tuple(slice(a - r, b - r) for (a, b), (r, _) in zip(both, region, strict=True))
        part = _to_host(data, within)
        if part.shape == whole.shape:
            return part
        into = whole[tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, at, strict=True))]
        pages.populate(into)
        into[...] = part
    return whole


def _to_host(data: Array | Shaped[np.ndarray, "..."], at: Block) -> Shaped[np.ndarray, "..."]:
    """Part of one shard: a view of its memory on the CPU and in host memory, else a copy of that part alone.

    JAX keeps the host copy of an array for as long as the array lives, so whole shards are never asked for.
    """
    if isinstance(data, np.ndarray):
        return data[at] if at else data
    if next(iter(data.devices())).platform == "cpu" or data.sharding.memory_kind == HOST:
        return np.asarray(data)[at] if at else np.asarray(data)
    sizes = tuple(s.stop - s.start for s in at)
    return np.asarray(_slice(data, np.array([s.start for s in at], np.int32), sizes=sizes))


@functools.partial(jax.jit, static_argnames="sizes")
def _slice(data: Shaped[Array, "..."], start: Shaped[Array, " ndim"], *, sizes: tuple[int, ...]) -> Array:
    return lax.dynamic_slice(data, [start[d] for d in range(data.ndim)], sizes)


def _assets(source: Checkpoint | None, assets: Mapping[str, Path | bytes] | None) -> dict[str, Path | bytes]:
    return {**(source.assets if source else {}), **(assets or {})}


def put_together(
    placed: Placed, parts: list[Json], provenance: Mapping[str, tuple[Json, ...]]
) -> tuple[Finished, str | None]:
    """Checksum and provenance of every leaf out of the parts of all processes, and what does not fit together."""
    finished: Finished = {}
    for path, (_, _, grid) in placed.items():
        found = [part[path] for part in parts if path in part]
        total = functools.reduce(sums.add, (tuple(f["sums"]) for f in found), (0, 0))
        if sum(f["files"] for f in found) != sum(1 for _ in grid.indices()):
            return {}, f"{path}: not every file was written once: the processes hold it differently"
        finished[path] = (sums.text(total), provenance.get(path, provenance.get(whole_path(path), ())))
    return finished, None


def _publish(
    staging: Staging, placed: Placed, finished: Finished, header: ManifestHeader, assets: Mapping, sync: bool
) -> str | None:
    """Publishes; returns what went wrong."""
    try:
        entries = store_assets(staging.root / ASSETS, assets, sync=sync)
        staging.publish(build_manifest(header, placed, finished, entries), sync=sync)
    except InputError as error:
        return str(error)
    return None


def provenance_of(source: Checkpoint | None) -> dict[str, tuple[Json, ...]]:
    """Path, of whole weights in any form -> source ranges of every leaf, for a model restored from this checkpoint."""
    if source is None:
        return {}
    known = {whole_path(path): leaf.provenance for path, leaf in source.manifest.leaves.items()}
    return known | {carried_path(key): leaf.provenance for key, leaf in source.manifest.carried.items()}
