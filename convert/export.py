"""A checkpoint back in PyTorch's layout: the files it was converted from, byte for byte where they were safetensors.

The manifest holds what each source file held and which block of which leaf every tensor became; the same pieces run
backwards fill the files again, in bounded memory.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.checkpoint import open as open_checkpoint
from shardzoo.checkpoints.dequantized import dequantized
from shardzoo.checkpoints.forms import DIFF, LORA, quantized_leaves
from shardzoo.checkpoints.grid import Grid
from shardzoo.checkpoints.journal import Journal
from shardzoo.checkpoints.store import storage_error, sync_folder, write_file
from shardzoo.convert.backwards import OutFile, OutPiece, cast_of, files_of, index_of
from shardzoo.convert.convert import BUDGET
from shardzoo.convert.families import FAMILIES, FamilyRules, Layout, rules_of
from shardzoo.convert.memory import few_arenas, peak_memory
from shardzoo.convert.names import batched_names
from shardzoo.convert.relayout import Relayout, misfits, relayout
from shardzoo.convert.replacing import check_place, locked, replacing
from shardzoo.convert.stopping import Interrupt, Stopped, held_back
from shardzoo.convert.stream import FileDigest
from shardzoo.errors import InputError, fail_if
from shardzoo.progress import Progress

SUFFIX = ".shardzoo-export"  # of the folder that an export is written in until it is whole
JOURNAL, FILES = "export.journal", "files"
OURS = {JOURNAL, "export.new", FILES}  # all that a killed run may leave
MOST_BLOCK = 32 << 20
# Of a block in each thread: its chunks as stored and decoded, the same of the next one, and what malloc keeps.
COPIES = 12
LEAST_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What an export wrote.

    Attributes:
        checkpoint, destination: paths as given.
        layout: how the tensors are named.
        files: every file written -> SHA-256.
        identical: weight files that have the SHA-256 of the file they came from.
        changed: weight files that do not, and why.
        notes: remarks for the user.
        bytes_written: of all files.
        bytes_resumed: of those, what an earlier interrupted run had written.
        seconds, peak_memory: time taken; most bytes resident in this process so far.
    """

    checkpoint: str
    destination: str
    layout: str
    files: dict[str, str]
    identical: tuple[str, ...]
    changed: dict[str, str]
    notes: tuple[str, ...]
    bytes_written: int
    bytes_resumed: int
    seconds: float
    peak_memory: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def export(
    ckpt: str | Path | Checkpoint,
    dst: str | Path,
    *,
    layout: str | None = None,
    dequantize: bool = False,
    overwrite: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes the folder that a checkpoint was converted from: weights, index, config and tokenizer files.

    Safetensors files come back byte for byte, their headers included, and are held against the SHA-256 that they had;
    tensors of PyTorch files come back in safetensors files with the same keys, shapes, dtypes and bits. In another
    layout of the family the same values come under its names, packed its way, beside its config.json. Stopped at any
    point it leaves nothing at `dst`; run again it carries on.

    Args:
        ckpt: the checkpoint.
        dst: the folder to write.
        layout: "transformers", "diffusers", ...; by default the one it was converted from.
        dequantize: write quantized weights as values times scales, in the dtype of the scales; refused without it.
        overwrite: replace a folder of weights at `dst` once the new one is whole.
        memory_budget: bytes of values in flight (default 128 MiB).
        progress: told of each block.

    Raises:
        InputError: a damaged checkpoint; a layout it cannot be written in, or none named for one that was not
            converted; a destination that exists, is full or not writable; a file that does not come out as it went in.
    """
    began = time.perf_counter()
    target = Path(os.path.abspath(dst))
    check_place(target, ckpt.path if isinstance(ckpt, Checkpoint) else ckpt)
    checkpoint = _plain(ckpt if isinstance(ckpt, Checkpoint) else open_checkpoint(ckpt), dequantize)
    other = _other_layout(checkpoint, layout)
    budget = BUDGET if memory_budget is None else memory_budget
    if budget < COPIES * LEAST_BLOCK:
        raise InputError(
            f"memory_budget={budget} is below the {COPIES * LEAST_BLOCK} bytes that a block needs: raise it"
        )
    few_arenas()
    made = Relayout(files=files_of(checkpoint), notes=()) if other is None else relayout(checkpoint, *other)
    files = [_rounded(file) for file in made.files] if dequantize else made.files
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(held_back())
        place = stack.enter_context(replacing(target, _is_export)) if overwrite else target
        staging = stack.enter_context(_Staging(place, checkpoint, layout, sum(file.size for file in files)))
        work = _Work(checkpoint, staging, files, budget, progress, interrupt)
        digests = work.run()
        _check_digests(files, digests)
        small = _small_files(checkpoint, files, other)
        staging.publish(small)
    return Report(
        checkpoint=str(checkpoint.path),
        destination=str(dst),
        layout=other[1].name if other else checkpoint.manifest.header.detail["layout"],
        files=digests | {name: hashlib.sha256(data).hexdigest() for name, data in small.items()},
        identical=tuple(file.name for file in files if file.sha256 is not None),
        changed={file.name: file.why_changed for file in files if file.why_changed},
        notes=made.notes,
        bytes_written=sum(file.size for file in files) + sum(map(len, small.values())),
        bytes_resumed=work.resumed,
        seconds=time.perf_counter() - began,
        peak_memory=peak_memory(),
    )


def _rounded(file: OutFile) -> OutFile:
    why = "its weights were quantized, and are written as they were rounded"
    return dataclasses.replace(file, why_changed=file.why_changed and why)


def _plain(checkpoint: Checkpoint, dequantize: bool) -> Checkpoint:
    """The checkpoint, or where it is quantized and that is wanted the view of it with plain weights.

    Raises:
        InputError: weights that no PyTorch layout has a place for: with adapters, or quantized.
    """
    leaves = checkpoint.manifest.leaves
    adapted = list(dict.fromkeys(path.partition(mark)[0] for mark in (LORA, DIFF) for path in leaves if mark in path))
    if adapted:
        raise InputError(
            f"{checkpoint.path}: holds adapters beside {len(adapted)} weights ({batched_names(adapted, 3)}), which no"
            " layout has a place for: restore it, merge them (`zoo.adapters.merge`), and save that"
        )
    quantized = quantized_leaves(leaves)
    if quantized and not dequantize:
        kinds = sorted({leaves[values].spec.dtype.name for values, _ in quantized.values()})
        raise InputError(
            f"{checkpoint.path}: {len(quantized)} weights are quantized to {' and '.join(kinds)}"
            f" ({batched_names(list(quantized), 3)}): their full precision is lost; pass dequantize=True (--dequantize)"
            " to write them as they were rounded"
        )
    if dequantize and not quantized:
        raise InputError(f"{checkpoint.path}: no weight is quantized: leave dequantize (--dequantize) out")
    return dequantized(checkpoint) if quantized else checkpoint


def _other_layout(checkpoint: Checkpoint, layout: str | None) -> tuple[FamilyRules, Layout] | None:
    """The layout to write, with its family's rules; None for the one that the checkpoint came in."""
    header = checkpoint.manifest.header
    came = header.detail.get("layout")
    rules = rules_of(header.family) if header.family in FAMILIES else None
    known = {one.name: one for one in rules.layouts} if rules else {}
    if came is None and layout is None:
        raise InputError(
            f"{checkpoint.path}: was saved from a running model, so it has no PyTorch files to go back to: name the"
            f" layout to write by layout= (--layout){_choices(known)}"
        )
    if layout in (None, came):
        return None
    meant = [one for name, one in known.items() if layout in (name, name.split(",")[0])]
    if rules is None or not meant:
        raise InputError(
            f"layout={layout!r} is not one of family {header.family}{_choices(known)}: leave layout out to get the one"
            " it came in"
        )
    # Names before a comma stand for several layouts, which are of models of different sizes.
    fitting = rules.layouts_of(checkpoint.config)
    meant = [one for one in meant if one in fitting] or meant
    chosen = next((one for one in meant if not misfits(checkpoint, rules, one)), meant[0])
    return None if chosen.name == came else (rules, chosen)


def _choices(known: Mapping[str, Layout]) -> str:
    return f" (there are {', '.join(map(repr, known))})" if known else " (there are none)"


def _is_export(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def _check_digests(files: list[OutFile], digests: Mapping[str, str]) -> None:
    fail_if(
        [
            f"{file.name}: sha256 is {digests[file.name]}, the file it came from had {file.sha256}"
            for file in files
            if file.sha256 is not None and digests[file.name] != file.sha256
        ],
        "export: files did not come out as they went in: run `shardzoo verify` on the checkpoint",
    )


def _small_files(
    checkpoint: Checkpoint, files: list[OutFile], other: tuple[FamilyRules, Layout] | None
) -> dict[str, bytes]:
    """Config, tokenizer and index files: as they came, but for what names files, dtypes or sizes in another way."""
    index_name = checkpoint.manifest.header.detail.get("index")
    exact = all(file.as_it_came for file in files)
    small = {name: path.read_bytes() for name, path in checkpoint.assets.items() if name != index_name or exact}
    if (index_name is not None and not exact) if other is None else len(files) > 1:
        small[f"{other[1].stem if other else 'model'}.safetensors.index.json"] = index_of(files)
    if other is not None and other[0].write_config is not None:
        small.pop("config.json", None)
        config = other[0].write_config(checkpoint.config, other[1].name)
        return small if config is None else small | {"config.json": _json(config)}
    cast = cast_of(checkpoint)
    if cast and "config.json" in small:
        small["config.json"] = _with_dtype(small["config.json"], cast)
    return small


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _with_dtype(config: bytes, dtype: str) -> bytes:
    content = json.loads(config)
    for name in ("torch_dtype", "dtype"):
        if name in content:
            content[name] = dtype
    return _json(content)


class _Staging:
    """The folder that an export is written in until it is whole: a journal, and the files in a folder of their own.

    Attributes:
        files: where the files are written; renamed to the destination in the end.
        finished: weight files that an earlier run of the same checkpoint wrote whole -> SHA-256.
    """

    def __init__(self, dst: Path, checkpoint: Checkpoint, layout: str | None, nbytes: int):
        self.dst = dst
        self.files = dst.with_name(dst.name + SUFFIX) / FILES
        self.finished: dict[str, str] = {}
        self._root = self.files.parent
        self._identity = hashlib.sha256(checkpoint.manifest.encode() + (layout or "").encode()).hexdigest()
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "_Staging":
        self._refuse_existing()
        with contextlib.ExitStack() as stack:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._root, self.dst))
                self._refuse_existing()
                self._refuse_others()
                self._journal = Journal(self._root / JOURNAL, self._identity)
                stack.callback(self._journal.close)
                self._resume()
                self._require_space()
            except OSError as error:
                raise storage_error(str(self.dst), error, self.dst.parent) from error
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.dst):
            raise InputError(f"{self.dst}: exists already: remove it, or choose another destination")

    def _refuse_others(self) -> None:
        if not set(os.listdir(self._root)) <= OURS:
            raise InputError(f"{self._root}: left by another program: remove it, or choose another destination")

    def _resume(self) -> None:
        """Keeps the files that an earlier run of the same checkpoint noted as whole, and removes all others."""
        for record in self._journal.records:
            path = self.files / record["file"]
            if path.is_file() and path.stat().st_size == record["size"]:
                self.finished[record["file"]] = record["sha256"]
        self.files.mkdir(exist_ok=True)
        keep = {self.files / name for name in self.finished}
        for folder, _, names in os.walk(self.files):
            for path in (Path(folder, name) for name in names):
                if path not in keep:
                    path.unlink()

    def _require_space(self) -> None:
        free = shutil.disk_usage(self.files).free
        need = self._nbytes - sum((self.files / name).stat().st_size for name in self.finished)
        if free < need + need // 50:
            raise InputError(
                f"{self.dst}: needs {need:,} bytes, {free:,} are free at {self.dst.parent}: free some, or choose"
                " another destination"
            )

    def note(self, name: str, size: int, sha256: str) -> None:
        """Writes down that a file is whole and on the device."""
        with self._lock:
            self._journal.add({"file": name, "size": size, "sha256": sha256})

    def publish(self, small: Mapping[str, bytes]) -> None:
        """Adds the small files and gives the folder its name; after that nothing of it is left here."""
        try:
            for name, data in small.items():
                (self.files / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(self.files / name, data)
            for folder, _, _ in os.walk(self.files):
                sync_folder(Path(folder))
            self._refuse_existing()
            os.rename(self.files, self.dst)
            sync_folder(self.dst.parent)
            shutil.rmtree(self._root)
        except OSError as error:
            raise storage_error(str(self.dst), error, self.dst.parent) from error


class _Work:
    """Writes the weight files, several at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        staging: _Staging,
        files: list[OutFile],
        budget: int,
        progress: Progress | None,
        interrupt: Interrupt,
    ):
        self._checkpoint, self._staging, self._files, self._progress = checkpoint, staging, files, progress
        self._interrupt = interrupt
        self._threads = max(1, min(len(files), os.cpu_count() or 2, budget // (COPIES * LEAST_BLOCK)))
        self._most = min(MOST_BLOCK, budget // (COPIES * self._threads))
        self._total, self._done = sum(file.size for file in files), 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.resumed = 0

    def run(self) -> dict[str, str]:
        """Writes what is not yet there; the SHA-256 of every file."""
        digests = dict(self._staging.finished)
        left = [file for file in self._files if file.name not in digests]
        self.resumed = self._done = sum(file.size for file in self._files if file.name in digests)
        with concurrent.futures.ThreadPoolExecutor(self._threads, "write") as pool:
            jobs = {pool.submit(self._guarded, file): file.name for file in left}
            try:
                for job in concurrent.futures.as_completed(jobs):
                    with contextlib.suppress(Stopped):
                        digests[jobs[job]] = job.result()
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
        self._interrupt.check()
        return digests

    def _guarded(self, file: OutFile) -> str:
        path = self._staging.files / file.name
        self._raise_if_stopped()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = self._write_file(file, path)
            self._staging.note(file.name, file.size, digest)
        except OSError as error:
            self._stop.set()
            raise storage_error(file.name, error, self._staging.dst.parent) from error
        except InputError:
            self._stop.set()
            raise
        return digest

    def _write_file(self, file: OutFile, path: Path) -> str:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        digest = FileDigest(path)
        try:
            _write_all(handle, memoryview(file.header), 0)
            digest.feed(0, memoryview(file.header))
            with concurrent.futures.ThreadPoolExecutor(1, "read") as ahead:
                for data, offset, runs in _lookahead(ahead, self._reads(file)):
                    if runs is None:
                        _write_all(handle, data.data, offset)
                        digest.feed(offset, data.data)
                    else:
                        _write_runs(handle, data, offset, *runs)
                    self._count(data.nbytes, file.name)
            os.fsync(handle)
            return digest.hexdigest(file.size)
        finally:
            digest.close()
            os.close(handle)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set() or self._interrupt.asked:
            raise Stopped

    def _count(self, nbytes: int, what: str) -> None:
        self._raise_if_stopped()
        with self._lock:
            self._done += nbytes
            done = self._done
        if self._progress:
            self._progress(done, self._total, what)

    def _reads(self, file: OutFile) -> Iterator[Callable[[], tuple[np.ndarray, int, tuple[int, ...] | None]]]:
        """The blocks of a file in its order, each as a call that reads it: its bytes and where they go."""
        for piece in file.pieces:
            grid = self._checkpoint.leaf(piece.path).grid
            most = piece.packed_bytes or self._most
            for block, first in flat_blocks(piece, grid, most):
                yield functools.partial(self._read, piece, block, first)

    def _read(self, piece: OutPiece, block: tuple[slice, ...], first: int) -> tuple[np.ndarray, int, Any]:
        values = self._checkpoint.read(piece.path, block)
        assert values.dtype.itemsize == piece.itemsize, f"{piece.path}: {values.dtype} has not {piece.itemsize} bytes"
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if piece.packed_bytes:
            return data[0::2] | data[1::2] << 4, piece.offset, None
        offset = piece.offset + first * piece.itemsize
        if piece.row_bytes == piece.row_stride:
            return data, offset, None
        return data, piece.offset, (first * piece.itemsize, piece.row_bytes, piece.row_stride)


def _lookahead(pool: concurrent.futures.Executor, calls: Iterator[Callable[[], Any]]) -> Iterator[Any]:
    """Results of `calls` in order, the next one under way while the caller has the last."""
    under_way = [pool.submit(call) for call in itertools.islice(calls, 1)]
    while under_way:
        under_way += [pool.submit(call) for call in itertools.islice(calls, 1)]
        yield under_way.pop(0).result()


def flat_blocks(piece: OutPiece, grid: Grid, most: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Blocks of a piece's leaf that follow each other in the piece's row-major order, of at most `most` bytes.

    Yields the block's ranges in the leaf and the position of its first element in the piece. Blocks keep to the grid's
    files, or at least its chunks, where those are small enough.
    """
    shape = [stop - start for start, stop in piece.at]
    if math.prod(shape) == 0:
        return
    pivot, stride = 0, math.prod(shape[1:])
    while pivot < len(shape) - 1 and stride * piece.itemsize > most:
        pivot += 1
        stride = math.prod(shape[pivot + 1 :])
    if not shape:
        yield (), 0
        return
    step = max(1, most // (stride * piece.itemsize))
    for cut in (grid.inner[pivot], grid.outer[pivot]):
        step = step // cut * cut or step
    first = 0
    for index in itertools.product(*(range(n) for n in shape[:pivot])):
        for start in range(0, shape[pivot], step):
            stop = min(start + step, shape[pivot])
            ranges = [(i, i + 1) for i in index] + [(start, stop)] + [(0, n) for n in shape[pivot + 1 :]]
            yield tuple(slice(a + o, b + o) for (a, b), (o, _) in zip(ranges, piece.at, strict=True)), first
            first += (stop - start) * stride


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


def _write_runs(handle: int, data: np.ndarray, offset: int, first: int, row_bytes: int, stride: int) -> None:
    """Writes bytes `first` on of a block whose rows of `row_bytes` lie `stride` apart in the file from `offset` on."""
    at = 0
    while at < data.nbytes:
        row, column = divmod(first + at, row_bytes)
        count = min(row_bytes - column, data.nbytes - at)
        _write_all(handle, data[at : at + count].data, offset + row * stride + column)
        at += count
