"""Restoring a checkpoint onto any mesh: each process reads the bytes that its devices hold, each of them once."""

import collections
import dataclasses as dc
import fnmatch
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from shardzoo.checkpoints import distributed, pages, sums
from shardzoo.checkpoints.checkpoint import Checkpoint, damage
from shardzoo.checkpoints.checkpoint import open as open_checkpoint
from shardzoo.checkpoints.grid import Block
from shardzoo.checkpoints.manifest import Leaf, canonical, sha256
from shardzoo.checkpoints.quantizing import Made, QuantizedWeight, finish, weights_to_quantize
from shardzoo.checkpoints.stored import Reader, Reading, StoredArray
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import quantize as quantization
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.layout import HOST, LAYER, Param, astype, audit, fill, named

BUDGET = 512 << 20  # bytes read and not yet on a device
PIECE = 64 << 20  # bytes of one read: a larger shard goes to an accelerator piece by piece


def restore(
    path: str | Path | Checkpoint,
    mesh: Mesh,
    *,
    declared: Any = None,
    family: str | None = None,
    dtype: Any = None,
    include: Iterable[str] | None = None,
    part: bool = False,
    quantize: str | None = None,
    verify: bool = False,
    budget: int = BUDGET,
    timeout: float = distributed.TIMEOUT,
) -> Any:
    """The live model of a checkpoint, split over `mesh` as its declaration says.

    Called by every process of the mesh. Nothing but the manifest is read before tree, shapes, dtypes and mesh fit.

    Args:
        path: the checkpoint.
        mesh: from `zoo.make_mesh`; any degrees that the model's sizes allow.
        declared: the declaration to fill, where it is not the one that the checkpoint's family and config give (another
            split at rest, a model of your own); its dtypes have to be the stored ones, unless `dtype` is given.
        family: the family that the checkpoint must be of.
        dtype: dtype of the restored floating-point leaves; as stored if None.
        include: patterns of leaf paths ("blocks.attn.*"); leaves that none matches stay `Param`.
        part: `declared` may be a part of the stored model: some of its leaves, and of stacked blocks the first ones
            (`decoder.encoder_part`).
        quantize: hold the weights that `zoo.quantize` chooses in 8 bits, "int8" or "fp8". They are quantized as they
            are read, some rows at a time; of a weight that is split on its inputs every process reads whole rows. The
            result is what `convert` with the same option stores, and of the declaration `zoo.quantize.declare` gives.
        verify: compare checksums taken on the devices with the manifest.
        budget: bytes that this process holds between file and device.
        timeout: seconds to wait for the other processes at the end.

    Raises:
        InputError: no such checkpoint; another family, tree, shape or dtype than declared; a mesh that does not fit;
            missing or damaged files. Every problem of a kind in one message; on every process alike.
        distributed.ProcessTimeout: another process did not finish in time.
    """
    where = path.path if isinstance(path, Checkpoint) else path
    with distributed.together("restore", where, timeout=timeout) as alike:
        dtype = float_dtype("restore", dtype)
        ckpt = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        _refuse_contradictions(verify=verify, part=part, quantize=quantize)
        declared = _declaration(ckpt, declared, family, dtype, part)
        declared = declared if quantize is None else _quantized(ckpt, declared, quantize, dtype)
        audit(declared, mesh)
        chosen = _choose(declared, include)
        made = {} if quantize is None else weights_to_quantize(ckpt, named(declared))
        stored = {p: q.dtype if p in made else ckpt.leaf(p).spec.dtype for p, q in chosen.items()}
        target = {p: stored[p] if p in made or q.fixed else _target_dtype(stored[p], dtype) for p, q in chosen.items()}
        read_as = stored if verify else target
        check_wide(read_as)
        alike["what is restored"] = _identity(ckpt, chosen, target)
    live: dict[str, Array] = {}
    with jax.set_mesh(None):  # work on single devices is refused under the caller's mesh
        with distributed.together("restore", where, timeout=timeout):
            try:
                shapes = {p: q.shape for p, q in chosen.items()}
                shardings = {p: q.sharding(mesh) for p, q in chosen.items()}
                live = read_leaves(ckpt, shapes, shardings, read_as, budget, made)
            finally:
                finish(made)
        if verify:
            _compare_checksums(ckpt, live, timeout)
            live = {p: _cast(a, target[p]) for p, a in live.items()}
    return fill(declared, {**named(declared), **live})


def _refuse_contradictions(*, verify: bool, part: bool, quantize: str | None) -> None:
    if part and verify:
        raise InputError("restore: verify=True compares whole leaves, and part=True reads parts: leave out one of them")
    if quantize and verify:
        raise InputError("restore: verify=True compares stored values, quantize= makes others: leave out one of them")


def _identity(ckpt: Checkpoint, chosen: Mapping[str, Param], dtypes: Mapping[str, np.dtype]) -> str:
    """Digest of what is read and of what becomes of it: processes that differ there would hold parts of two models."""
    read = {path: leaf.checksum for path, leaf in ckpt.manifest.leaves.items()}
    become = {path: [list(param.shape), dtypes[path].name] for path, param in chosen.items()}
    return sha256(canonical([read, become]))


def _declaration(ckpt: Checkpoint, declared: Any, family: str | None, dtype: Any, part: bool) -> Any:
    """The declaration to fill, checked against the manifest."""
    stored = ckpt.manifest.header.family
    if family is not None and family != stored:
        raise InputError(f"{ckpt.path}: family={stored!r} is not {family!r}: choose another checkpoint or family")
    given = declared is not None
    if not given:
        declared = ckpt.declared
    problems = tree_problems(declared, ckpt.manifest.leaves, dtypes=given and dtype is None, part=part)
    fail_if(problems, f"{ckpt.path}: does not hold the declared model")
    return declared


def _quantized(ckpt: Checkpoint, declared: Any, kind: str, dtype: Any) -> Any:
    """The declaration with its weights quantized."""
    there = quantization.kind_of(declared)
    if there not in (None, kind):
        raise InputError(f"{ckpt.path}: quantize={kind!r}, and its weights are {there} already: leave quantize out")
    return quantization.declare(declared if dtype is None else astype(declared, dtype), kind)


def tree_problems(
    declared: Any, leaves: Mapping[str, Leaf], *, dtypes: bool, part: bool = False, cast: str = "pass dtype= to cast"
) -> list[str]:
    """Every way in which stored leaves are not those of a declaration, which may be of a `part` of the model."""
    params = named(declared)
    problems = [f"{p}: declared, but not in the checkpoint" for p in params if p not in leaves]
    problems += [f"{p}: in the checkpoint, but not declared" for p in leaves if p not in params and not part]
    for path, param in params.items():
        if path not in leaves:
            continue
        spec = leaves[path].spec
        first = part and LAYER in spec.dims[:1] and param.shape[1:] == spec.shape[1:] and param.shape < spec.shape
        if spec.shape != tuple(param.shape) and not first:
            sizes = ", ".join(f"{d}={n}" for d, n in zip(spec.dims, spec.shape, strict=True))
            problems.append(f"{path}: stored with shape {list(spec.shape)} ({sizes}), declared {list(param.shape)}")
        elif spec.dims != param.names:
            problems.append(f"{path}: stored with dims {' '.join(spec.dims)!r}, declared {param.dims!r}")
        if dtypes and spec.dtype != param.dtype:
            problems.append(f"{path}: stored as {spec.dtype.name}, declared {param.dtype.name}: {cast}")
    return problems


def _choose(declared: Any, include: Iterable[str] | None) -> dict[str, Param]:
    params = named(declared)
    if include is None:
        return params
    patterns = [include] if isinstance(include, str) else list(include)
    unused = [p for p in patterns if not fnmatch.filter(params, p)]
    fail_if([f"include={p!r} matches no leaf" for p in unused], f"restore: there are {len(params)} leaves, such as"
            f" {', '.join(list(params)[:3])}")  # fmt: skip
    return {path: q for path, q in params.items() if any(fnmatch.fnmatchcase(path, p) for p in patterns)}


def _target_dtype(stored: np.dtype, wanted: np.dtype | None) -> np.dtype:
    return wanted if wanted is not None and jnp.issubdtype(stored, jnp.floating) else stored


def check_wide(dtypes: Mapping[str, np.dtype]) -> None:
    """Refuses dtypes that JAX would narrow unasked."""
    wide = [f"{p}: {d.name}" for p, d in dtypes.items() if jax.dtypes.canonicalize_dtype(d) != d]
    fail_if(wide, "restore: JAX holds these in 32 bits unless jax_enable_x64 is set: set it, or pass dtype=")


@dc.dataclass(frozen=True)
class _Job:
    """One block that devices of this process hold, or their host for them.

    `at` are its ranges, `memory` is the kind that the devices hold it in.
    """

    path: str
    at: Block
    devices: tuple[jax.Device, ...]
    memory: str | None
    nbytes: int

    def put(self, host: Shaped[np.ndarray, "..."], device: jax.Device) -> Array:
        return jax.device_put(host, SingleDeviceSharding(device, memory_kind=self.memory))


def read_leaves(
    ckpt: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, NamedSharding],
    dtypes: Mapping[str, np.dtype],
    budget: int,
    made: Mapping[str, tuple[QuantizedWeight, Any]],
) -> dict[str, Array]:
    """Reads and places the blocks of every leaf, several at a time; leaves in the order of `shardings`."""
    placed: dict[str, dict[jax.Device, Array]] = collections.defaultdict(dict)
    waiting: collections.deque = collections.deque()
    free = budget
    live: dict[str, Array] = {}

    def settle() -> int:
        job, source, reading = waiting.popleft()
        for device, value in _place(job, source, reading).items():
            placed[job.path][device] = value
        return job.nbytes

    with Reader() as reader:
        for job in _jobs(ckpt, shapes, shardings, dtypes, made):
            while waiting and free < job.nbytes:
                free += settle()
            source = _source(ckpt, job, dtypes[job.path], reader, made)
            waiting.append((job, source, None if _goes_in_pieces(job) else _read(source)))
            free -= job.nbytes
        while waiting:
            settle()
    for path, sharding in shardings.items():
        arrays = [placed[path][d] for d in sharding.addressable_devices_indices_map(shapes[path])]
        live[path] = jax.make_array_from_single_device_arrays(shapes[path], sharding, arrays)
    return live


def _jobs(
    ckpt: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, NamedSharding],
    dtypes: Mapping[str, np.dtype],
    made: Mapping[str, tuple[QuantizedWeight, Any]],
) -> Iterator[_Job]:
    """The distinct blocks of this process; a block that several of its devices hold comes once."""
    for path, sharding in shardings.items():
        shape = shapes[path]
        item = max(dtypes[path].itemsize, 0 if path in made else ckpt.leaf(path).spec.dtype.itemsize)
        holders: dict[tuple, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None  # of addressable devices only
            at = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))
            holders.setdefault(at, []).append(device)
        for at, devices in holders.items():
            size = math.prod(b - a for a, b in at) * item
            yield _Job(path, tuple(slice(*r) for r in at), tuple(devices), sharding.memory_kind, size)


def _source(
    ckpt: Checkpoint,
    job: _Job,
    dtype: np.dtype,
    reader: Reader,
    made: Mapping[str, tuple[QuantizedWeight, Any]],
) -> StoredArray | Made:
    """The block in `dtype`, in the leaf's own indices; nothing is read yet."""
    if job.path in made:
        weight, part = made[job.path]
        weight.open(reader)
        return Made(weight, part, job.at, dtype)
    leaf = ckpt.leaf(job.path)
    return reader.open(ckpt.path / leaf.folder, leaf.spec, leaf.grid).cast(dtype).at(job.at)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Host memory aligned to 64 bytes: JAX on the CPU shares such memory and copies other."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= pages.LEAST:
        return pages.empty(shape, dtype)
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _read(source: StoredArray | Made) -> Reading:
    """Begins reading a block into host memory."""
    return source.begin(_empty(source.shape, source.numpy_dtype))


def _goes_in_pieces(job: _Job) -> bool:
    """Whether the block is large and its devices have memory of their own: it then passes the host in pieces."""
    return job.nbytes > PIECE and job.memory != HOST and not _shares_host_memory(job.devices)


def _shares_host_memory(devices: Iterable[jax.Device]) -> bool:
    return all(d.platform == "cpu" for d in devices)


def _place(job: _Job, source: StoredArray | Made, reading: Reading | None) -> dict[jax.Device, Array]:
    """The block on each of its devices."""
    try:
        if reading is None:
            return _place_in_pieces(job, source)
        host = reading.result()
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise damage(job.path, error) from error
    placed = {device: job.put(host, device) for device in job.devices}
    jax.block_until_ready(list(placed.values()))
    return placed


def _place_in_pieces(job: _Job, source: StoredArray | Made) -> dict[jax.Device, Array]:
    """As `_place`, with only two pieces of the block on the host at a time."""
    shape, low = source.shape, tuple(at.start for at in job.at)
    axis = next(d for d, n in enumerate(shape) if n > 1)
    rows = max(1, PIECE * shape[axis] // (math.prod(shape) * source.numpy_dtype.itemsize))
    starts = range(low[axis], low[axis] + shape[axis], rows)
    parts = [source.cut(axis, at, min(at + rows, starts.stop)) for at in starts]
    placed = {d: jnp.zeros(shape, source.numpy_dtype, device=d) for d in job.devices}
    reading = _read(parts[0])
    for i, at in enumerate(starts):
        host = reading.result()
        if i + 1 < len(parts):
            reading = _read(parts[i + 1])
        start = np.zeros(len(shape), np.int32)
        start[axis] = at - low[axis]
        placed = {d: _update(whole, jax.device_put(host, d), start) for d, whole in placed.items()}
        jax.block_until_ready(list(placed.values()))
    return placed


@functools.partial(jax.jit, donate_argnums=0)
def _update(whole: Shaped[Array, "..."], part: Shaped[Array, "..."], start: Shaped[Array, " ndim"]) -> Array:
    return lax.dynamic_update_slice(whole, part, [start[d] for d in range(whole.ndim)])


def _cast(leaf: Array, dtype: np.dtype) -> Array:
    """The leaf in another dtype, each shard on its own device."""
    if leaf.dtype == dtype:
        return leaf
    if leaf.sharding.memory_kind == HOST:
        shards = [jax.device_put(np.asarray(s.data).astype(dtype), s.data.sharding) for s in leaf.addressable_shards]
    else:
        shards = [s.data.astype(dtype) for s in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _checksums(live: Mapping[str, Array], timeout: float) -> dict[str, str]:
    """Path -> checksum of arrays on devices, over all processes."""
    parts = distributed.share("checksum", [sums.of_array(a) for a in live.values()], timeout=timeout)
    totals = [functools.reduce(sums.add, map(tuple, column)) for column in zip(*parts, strict=True)]
    return {path: sums.text(total) for path, total in zip(live, totals, strict=True)}


def checksum(model: Any, *, timeout: float = distributed.TIMEOUT) -> dict[str, str]:
    """Path -> checksum of a live model, computed under jit where its shards are: the same on every mesh.

    The values of unchanged leaves in their stored dtype are those of the manifest (`leaf.checksum`). Called by every
    process.

    Raises:
        distributed.ProcessTimeout: another process did not arrive in time.
    """
    leaves = {p: a for p, a in named(model).items() if isinstance(a, jax.Array)}
    with jax.set_mesh(None):
        return _checksums(leaves, timeout)


def _compare_checksums(ckpt: Checkpoint, live: Mapping[str, Array], timeout: float) -> None:
    """Holds arrays on devices against the manifest.

    Raises:
        InputError: leaves whose checksum differs, all in one message.
    """
    found = _checksums(live, timeout)
    wrong = [
        f"{path}: checksum {text} on the devices is not {ckpt.leaf(path).checksum}, as it was written"
        for path, text in found.items()
        if text != ckpt.leaf(path).checksum
    ]
    fail_if(wrong, f"{ckpt.path}: the restored values are not the stored ones; restore again, and check the hardware")
