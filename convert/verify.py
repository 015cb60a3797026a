"""Compares a checkpoint with what it was converted from, tensor by tensor and bit by bit."""

import concurrent.futures
import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo import checkpoints
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.checkpoint import open as open_checkpoint
from shardzoo.checkpoints.forms import VALUES, quantized_leaves
from shardzoo.checkpoints.manifest import Leaf
from shardzoo.convert.backwards import cast_of
from shardzoo.convert.rules import Part, Piece, part
from shardzoo.convert.source import Source, open_source
from shardzoo.convert.stream import blocks_of, take
from shardzoo.errors import InputError, fail_if
from shardzoo.progress import Progress
from shardzoo.zoo import quantize
from shardzoo.zoo.quantize import dequantize

MOST_NAMED = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One source tensor against what is stored of it.

    Attributes:
        key: its name in the source.
        leaves: paths of the leaves that hold it.
        values: how many were compared.
        different: how many of them differ in their bits.
        first: index of the first of those in the leaf, or None.
        largest: largest difference of two finite values, or 0.
        problem: why nothing could be compared, or None.
    """

    key: str
    leaves: tuple[str, ...]
    values: int = 0
    different: int = 0
    first: tuple[int, ...] | None = None
    largest: float = 0.0
    problem: str | None = None

    @property
    def equal(self) -> bool:
        return self.problem is None and self.different == 0

    def line(self) -> str:
        """The difference in words."""
        if self.problem is not None:
            return f"{self.key}: {self.problem}"
        place = f"{self.leaves[0]}{list(self.first or ())}"
        return (
            f"{self.key}: {self.different} of {self.values} values differ, the first at {place},"
            f" by at most {self.largest:g}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """How far quantized weights are from those of the source: root mean square of the error over that of the weights.

    Attributes:
        kind: "int8" or "fp8", or both.
        error: of all quantized weights together.
        groups: of those of each part of the model ("blocks.attn").
        worst: path of the weight that is furthest off, and `worst_error` by how much.
    """

    kind: str
    error: float
    groups: Mapping[str, float]
    worst: str
    worst_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was compared and how it came out.

    Attributes:
        checkpoint, source: paths as given; source is None where the checkpoint was only held against its own manifest.
        level: "quick" or "full", as `checkpoints.verify` takes it, or "source".
        files, leaves: of the checkpoint, that were checked.
        tensors: one entry for each source tensor that is stored.
        bytes_compared: of values.
        cast: dtype that values were cast to before they were compared, or None.
        seconds: time taken.
        rounding: of quantized weights, where they were compared with the source.
    """

    checkpoint: str
    source: str | None
    level: str
    files: int
    leaves: int
    tensors: tuple[TensorReport, ...]
    bytes_compared: int
    cast: str | None
    seconds: float
    rounding: Rounding | None = None

    @property
    def equal(self) -> bool:
        return all(tensor.equal for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"equal": self.equal}


def verify(
    ckpt: str | Path,
    src: str | Path | None = None,
    *,
    level: str = "full",
    variant: str | None = None,
    select: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Checks a checkpoint against its manifest, or with `src` against the files it was converted from.

    With `src` every stored tensor is compared bit for bit, cast to the dtype that is stored; a quantized weight must be
    as near to the source's as its stored values can be, and `Report.rounding` says how near all of them are. The
    checkpoint's file list and metadata are checked as well.

    Args:
        ckpt: the checkpoint.
        src: the source, wherever it is now.
        level: without `src`: "quick" (files and metadata) or "full" (every value against its checksums).
        variant, select: of `src`, see `open_source`.
        progress: told of each block.

    Raises:
        InputError: every damaged file or tensor that differs, by name, in one message.
    """
    report = compare(ckpt, src, level=level, variant=variant, select=select, progress=progress)
    lines = [tensor.line() for tensor in report.tensors if not tensor.equal]
    if len(lines) > MOST_NAMED:
        lines[MOST_NAMED:] = [f"and {len(lines) - MOST_NAMED} more tensors"]
    fail_if(lines, f"{ckpt}: differs from {src}")
    return report


def compare(
    ckpt: str | Path,
    src: str | Path | None = None,
    *,
    level: str = "full",
    variant: str | None = None,
    select: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """As `verify`, but differences from the source are in the report and raise nothing."""
    began = time.perf_counter()
    checkpoint = open_checkpoint(ckpt)
    total = checkpoint.manifest.total_bytes
    told = _Told(progress, total, str(ckpt))
    checked = checkpoints.verify(ckpt, "quick" if src is not None else level, progress=told.more)
    tensors: tuple[TensorReport, ...] = ()
    rounding: Rounding | None = None
    if src is not None:
        with open_source(src, variant=variant, select=select) as source:
            comparison = _Comparison(checkpoint, source, progress)
            tensors, rounding = comparison.run(), comparison.rounding()
    return Report(
        checkpoint=str(ckpt),
        source=None if src is None else str(src),
        level=level if src is None else "source",
        files=checked.files,
        leaves=checked.leaves,
        tensors=tensors,
        bytes_compared=checked.nbytes if src is None else _nbytes(checkpoint, tensors),
        cast=cast_of(checkpoint),
        seconds=time.perf_counter() - began,
        rounding=rounding,
    )


def _nbytes(checkpoint: Checkpoint, tensors: tuple[TensorReport, ...]) -> int:
    return sum(t.values * checkpoint.leaf(t.leaves[0]).spec.dtype.itemsize for t in tensors if t.leaves)


class _Told:
    """Adds up bytes for a `Progress`."""

    def __init__(self, progress: Progress | None, total: int, what: str):
        self._progress, self._total, self._what, self._done = progress, total, what, 0
        self._lock = threading.Lock()

    def more(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done = self._done
        if self._progress:
            self._progress(min(done, self._total), self._total, self._what)


@dataclasses.dataclass
class _Tally:
    values: int = 0
    different: int = 0
    first: tuple[int, ...] | None = None
    largest: float = 0.0


class _Comparison:
    """Every stored tensor of a source against the checkpoint, several blocks at a time."""

    def __init__(self, checkpoint: Checkpoint, source: Source, progress: Progress | None):
        self._checkpoint, self._source = checkpoint, source
        self._header = checkpoint.manifest.header
        if "tensors" not in self._header.detail:
            raise InputError(f"{checkpoint.path}: was saved from a running model: it has no source to compare with")
        self._pieces: dict[str, list[tuple[Piece, Leaf]]] = {}
        for path, leaf in checkpoint.manifest.all_leaves().items():
            for record in leaf.provenance:
                piece = Piece(path, _ranges(record["at"]), record["key"], _ranges(record["take"]))
                self._pieces.setdefault(record["key"], []).append((piece, leaf))
        self._tallies: dict[str, _Tally] = {}
        self._scales = dict(quantized_leaves(checkpoint.manifest.leaves).values())
        self._squares: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        total = sum(leaf.spec.nbytes for leaf in checkpoint.manifest.all_leaves().values())
        self._told = _Told(progress, total, str(source.root))

    def run(self) -> tuple[TensorReport, ...]:
        """One report for each tensor, in the order of the source; missing and new ones last."""
        table: Mapping[str, list[Any]] = self._header.detail["tensors"]
        skipped = {entry.key for entry in self._header.skipped}
        reports = {key: self._misfit(key, entry) for key, entry in table.items() if key not in skipped}
        sound = [key for key, report in reports.items() if report is None]
        self._tallies = {key: _Tally() for key in sound}
        _each(self._blocks(sound), self._compare)
        reports |= {key: self._report(key) for key in sound}
        new = [key for key in self._source.tensors if key not in table]
        reports |= {key: TensorReport(key=key, leaves=(), problem="was not there when it was converted") for key in new}
        return tuple(report for report in reports.values() if report is not None)

    def _misfit(self, key: str, entry: list[Any]) -> TensorReport | None:
        _, dtype, shape = entry
        leaves = tuple(piece.target for piece, _ in self._pieces.get(self._header.aliases.get(key, key), ()))
        info = self._source.tensors.get(key)
        problem = None
        if info is None:
            problem = "is no longer in the source"
        elif info.shape != tuple(shape) or info.dtype.name != dtype:
            problem = f"is {info.dtype.name}{list(info.shape)} now, was {dtype}{shape} when it was converted"
        elif not leaves:
            problem = "is in no leaf of the checkpoint"
        return None if problem is None else TensorReport(key=key, leaves=leaves, problem=problem)

    def _report(self, key: str) -> TensorReport:
        tally = self._tallies[key]
        leaves = tuple(piece.target for piece, _ in self._pieces[self._header.aliases.get(key, key)])
        return TensorReport(key=key, leaves=leaves, **dataclasses.asdict(tally))

    def _blocks(self, keys: list[str]) -> Iterator[tuple[str, Piece, Leaf, Part]]:
        for key in keys:
            for piece, leaf in self._pieces[self._header.aliases.get(key, key)]:
                for block in blocks_of(piece.at, leaf.grid):
                    share = part(piece, block)
                    if share is not None:
                        yield key, dataclasses.replace(piece, source=key), leaf, share

    def _compare(self, key: str, piece: Piece, leaf: Leaf, share: Part) -> None:
        rows, _, values = take(self._source, piece, share)
        at = tuple(slice(a, b) for a, b in share.at)
        stored = self._checkpoint.read(piece.target, at)
        if piece.target in self._scales:
            wanted, stored, different = self._compare_quantized(piece.target, at, values, stored)
        else:
            with np.errstate(over="ignore"):
                wanted = values if values.dtype == stored.dtype else values.astype(stored.dtype)
            different = _bits(wanted) != _bits(stored)
        count = int(np.count_nonzero(different))
        with self._lock:
            tally = self._tallies[key]
            tally.values += values.size
            tally.different += count
            if count:
                tally.largest = max(tally.largest, _largest(wanted[different], stored[different]))
                place = np.unravel_index(int(np.argmax(different)), different.shape)
                first = tuple(int(i) + a for i, (a, _) in zip(place, share.at, strict=True))
                tally.first = first if tally.first is None else min(first, tally.first)
        self._source.release(key, rows)
        self._told.more(stored.nbytes)

    def _compare_quantized(
        self, path: str, at: tuple[slice, ...], values: np.ndarray, stored: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The source's weights, those that values and scales stand for, and where they are further off than need be."""
        scales = self._scales[path]
        outputs = len(self._checkpoint.leaf(scales).spec.shape)
        scale = self._checkpoint.read(scales, at[:outputs])
        wanted, found = values.astype(np.float32), dequantize(stored, scale, np.dtype(np.float32))
        error = found - wanted
        off, size = (float(np.sum(np.square(x, dtype=np.float64))) for x in (error, wanted))
        with self._lock:
            before = self._squares.get(path, (0.0, 0.0))
            self._squares[path] = (before[0] + off, before[1] + size)
        return wanted, found, ~(np.abs(error) <= coarseness(wanted, scale, stored.dtype))

    def rounding(self) -> Rounding | None:
        """The errors of all quantized weights that were compared."""
        if not self._squares:
            return None
        by_leaf = {path.removesuffix(VALUES): squares for path, squares in self._squares.items()}
        groups: dict[str, tuple[float, float]] = {}
        for path, (error, size) in by_leaf.items():
            group = ".".join(path.split(".")[:-2])
            before = groups.get(group, (0.0, 0.0))
            groups[group] = (before[0] + error, before[1] + size)
        worst = max(by_leaf, key=lambda path: _relative(by_leaf[path]))
        kinds = {self._checkpoint.leaf(path).spec.dtype for path in self._squares}
        return Rounding(
            kind=" and ".join(sorted(kind for dtype, kind in quantize.KINDS.items() if dtype in kinds)),
            error=_relative((sum(e for e, _ in by_leaf.values()), sum(n for _, n in by_leaf.values()))),
            groups={group: _relative(squares) for group, squares in groups.items()},
            worst=worst,
            worst_error=_relative(by_leaf[worst]),
        )


def _relative(squares: tuple[float, float]) -> float:
    error, size = squares
    return math.sqrt(error / size) if size else 0.0


def coarseness(weights: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """How far off a quantized weight may be: half the distance of two values, and a little for the scale's rounding."""
    step = scale.astype(np.float32).reshape(*scale.shape, *[1] * (weights.ndim - scale.ndim))
    if dtype == quantize.DTYPES["int8"]:
        return step * np.float32(0.5 * (1 + 2**-6))
    return np.maximum(np.abs(weights) * np.float32(2**-4), step * np.float32(2**-10)) * np.float32(1 + 2**-6)


def _ranges(lists: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in lists)


def _bits(values: np.ndarray) -> np.ndarray:
    """The values' bits as whole numbers, or for wide types as records that compare by their bits."""
    item = values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{item}" if item in (1, 2, 4, 8) else f"V{item}")


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    if one.dtype.kind == "c":
        return float(np.max(np.abs(one - other)))
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))


def _each(items: Iterator[tuple[Any, ...]], work: Any) -> None:
    """Runs `work` on every item with a few threads, never holding more than twice as many items as threads."""
    threads = max(2, min(8, os.cpu_count() or 2))
    with concurrent.futures.ThreadPoolExecutor(threads, "verify") as pool:
        under_way: list[concurrent.futures.Future] = []
        try:
            for item in items:
                under_way.append(pool.submit(work, *item))
                if len(under_way) >= 2 * threads:
                    under_way.pop(0).result()
            for job in under_way:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
