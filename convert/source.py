"""A checkpoint in PyTorch's world as one mapping of tensors, whatever files it lies in.

`open_source` reads headers only. Tensors are read one block of rows at a time, by any number of threads.
"""

import copy
import os
import types
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints.orbax_layout import CHECKPOINT_METADATA
from shardzoo.checkpoints.pipeline import is_pipeline, is_unfinished
from shardzoo.convert.file_bytes import (
    FileBytes,
    Stored,
    Strategy,
    read_stored,
    release_stored,
)
from shardzoo.convert.folder import EXTRAS, Index, WeightFiles, find_weights, read_config
from shardzoo.convert.hub import Fetched, fetch, is_hub_address
from shardzoo.convert.names import batched_names
from shardzoo.convert.scaled import PRODUCT, find_scales, product
from shardzoo.convert.weight_file import WeightFile, open_weight_file
from shardzoo.errors import InputError, fail_if

MAX_EXTRA_BYTES = 256 << 20
MAX_REPORTED = 60


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a source: `file` indexes `Source.files`, `nbytes` is its size as stored (row-major).

    `offset` is where in the file its bytes stand as `read` returns them; None if they are gathered or unpacked.
    Tensors with equal `memory` are the same memory under several names (weights tied in the file itself).
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: int
    nbytes: int
    memory: tuple[Any, ...]
    offset: int | None


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One weight file: `path` relative to the source's folder, `kind` "safetensors", "pt-zip" or "pt-legacy".

    `header` is the raw JSON of a safetensors file (empty for others). `wrapper` is the path of keys inside a PyTorch
    file at which the weights were found, () for the file's top level. `scaled` counts the weights that have scales.
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    header: bytes
    wrapper: tuple[str, ...] = ()
    scaled: int = 0


class Source:
    """An opened checkpoint; use as a context manager or call `close`.

    Attributes:
        root: the folder.
        hub: repository and commit, where the source was fetched from the hub, or None.
        tensors: key -> TensorInfo, in the order of the files. Weights that have scales beside them are the products of
            the two (see `convert.scaled`), and the scales are not among them.
        files: the weight files read.
        config: `config.json` of the folder, parsed, or None; `config_text` is the file as it stands.
        index_name, index_text: the index of weights, verbatim, or None.
        extras: tokenizer and other small files to carry along.
        notes: remarks for the user (files not read, a wrapper chosen).
    """

    def __init__(self, weights: WeightFiles, opened: list[WeightFile], fetched: Fetched | None = None):
        self.root = weights.root
        self.hub = fetched.origin if fetched else None
        self.notes = weights.notes + [note for file in opened for note in file.notes]
        self.index_name = weights.index.path.name if weights.index else None
        self.index_text = weights.index.text if weights.index else None
        self._data: list[FileBytes] = [file.data for file in opened]
        self._stored: dict[str, tuple[int, Stored]] = {
            key: (number, stored) for number, file in enumerate(opened) for key, stored in file.tensors.items()
        }
        self._scales, beside = find_scales({key: stored for key, (_, stored) in self._stored.items()})
        scaled = Counter(self._stored[key][0] for key in self._scales)
        self.files = [_described(n, f, scaled[i]) for i, (n, f) in enumerate(zip(weights.files, opened, strict=True))]
        if scaled:
            self.notes.append(
                f"{scaled.total()} weights are 8-bit floats with scales: read as their products, in {PRODUCT.name}"
            )
        infos = {key: _info(key, *placed) for key, placed in self._stored.items() if key not in beside}
        infos |= {key: _as_product(infos[key]) for key in self._scales}
        self.tensors: Mapping[str, TensorInfo] = types.MappingProxyType(infos)
        self.config_text: str | None = None
        self.config: dict[str, Any] | None = None
        if os.path.isfile(self.root / "config.json"):
            self.config_text, self.config = read_config(self.root / "config.json")
        self.extras = _find_extras(self.root)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Arrays that were read stay valid."""
        for data in self._data:
            data.close()

    def part(self, keys: Collection[str]) -> "Source":
        """The same opened files with these tensors alone; closed with this source."""
        one = copy.copy(self)
        one.tensors = types.MappingProxyType({key: info for key, info in self.tensors.items() if key in keys})
        return one

    def named(self, key_of: Mapping[str, str]) -> "Source":
        """The same with its tensors by other keys, for planning alone: they are read by their own."""
        one = copy.copy(self)
        infos = {other: replace(self.tensors[key], key=other) for other, key in key_of.items()}
        one.tensors = types.MappingProxyType(infos)
        return one

    def set_config_aside(self, why: str) -> None:
        """Treats the folder's config.json as not there, and says why."""
        self.config_text = self.config = None
        self.notes.append(why)

    def path_of(self, file: int) -> Path:
        """The weight file with this index."""
        return self._data[file].path

    def populate(self, file: int, offset: int, count: int) -> None:
        """Maps these bytes of a weight file in one call, where it is mapped, for reading them whole."""
        self._data[file].populate(offset, count)

    def _find(self, key: str) -> tuple[FileBytes, Stored]:
        if key not in self._stored:
            raise InputError(f"{self.root}: holds no tensor {key!r}")
        number, stored = self._stored[key]
        return self._data[number], stored

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        """The tensor `key`, or `rows` of its first dimension: exact bits, row-major, aligned.

        Returns:
            A read-only view of the mapped file where it can be one, else a fresh array.

        Raises:
            InputError: no such tensor, or the file changed or cannot be read.
        """
        data, stored = self._find(key)
        values = read_stored(data, stored, rows)
        if key not in self._scales:
            return values
        scale = self.read(self._scales[key])
        return product(values, scale if scale.size == 1 or rows is None else scale[rows])

    def release(self, key: str, rows: slice | None = None) -> None:
        """Gives the memory of pages that `read` mapped back to the system; views read before stay valid."""
        data, stored = self._find(key)
        release_stored(data, stored, rows)


def row_blocks(info: TensorInfo, block_bytes: int) -> list[slice | None]:
    """Ranges of rows of about `block_bytes` that together make the tensor; [None] where it has no rows to cut."""
    if not info.shape or info.shape[0] == 0:
        return [None]
    step = max(1, block_bytes * info.shape[0] // max(info.nbytes, 1))
    return [slice(start, min(start + step, info.shape[0])) for start in range(0, info.shape[0], step)]


def _info(key: str, number: int, stored: Stored) -> TensorInfo:
    memory = (number, stored.storage, stored.offset, stored.strides, stored.shape, str(stored.dtype))
    return TensorInfo(
        key=key,
        shape=stored.shape,
        dtype=stored.dtype,
        file=number,
        nbytes=stored.nbytes,
        memory=memory,
        offset=stored.offset if stored.strides is None and not stored.packed else None,
    )


def _as_product(info: TensorInfo) -> TensorInfo:
    nbytes = info.nbytes // info.dtype.itemsize * PRODUCT.itemsize
    return replace(info, dtype=PRODUCT, nbytes=nbytes, offset=None)


def _described(name: str, file: WeightFile, scaled: int) -> SourceFile:
    return SourceFile(
        path=name,
        kind=file.kind,
        size=file.data.size,
        mtime_ns=file.data.mtime_ns,
        header=file.header,
        wrapper=file.wrapper,
        scaled=scaled,
    )


def _find_extras(folder: Path) -> list[Path]:
    found = {path for pattern in EXTRAS for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.stat().st_size <= MAX_EXTRA_BYTES)


def open_source(
    path: str | Path,
    *,
    variant: str | None = None,
    select: str | None = None,
    strategy: Strategy = "auto",
    verify_crc: bool = False,
) -> Source:
    """Opens a folder, a weight file, an index of weights or a hub repository; checks every header, reads no tensor.

    Args:
        path: where the checkpoint is; `hf://owner/name[@revision][/folder]` is downloaded first.
        variant: which of several twins to read ("fp16", ...); by default the one without a variant.
        select: which dict of a PyTorch file to read, where it holds several ("ema", "state/model"; "/" is all of it).
        strategy: "mmap", "pread", or "auto" (`pread` on network file systems).
        verify_crc: read every storage of PyTorch files through and hold it against the archive's CRC-32.

    Raises:
        InputError: everything that is wrong with the files, at once, each with its name; a checkpoint of shardzoo.
    """
    fetched = fetch(str(path), variant=variant) if is_hub_address(str(path)) else None
    if fetched is None and os.path.isdir(path):
        _refuse_own(Path(path))
    weights = find_weights(fetched.folder if fetched else Path(path), variant)
    options = {"strategy": strategy, "select": select, "verify_crc": verify_crc}
    opened: list[WeightFile] = []
    problems: list[str] = []
    try:
        for name in weights.files:
            _open_one(weights, name, options, opened, problems)
        by_name = dict(zip(weights.files, opened, strict=True)) if not problems else _by_path(weights, opened)
        if weights.index:
            problems += _against_index(weights.index, by_name)
        else:
            problems += _shared_keys(by_name)
        if len(problems) > MAX_REPORTED:
            problems[MAX_REPORTED:] = [f"and {len(problems) - MAX_REPORTED} more problems"]
        _raise_all(weights, problems)
        return Source(weights, opened, fetched)
    except InputError:
        for file in opened:
            file.data.close()
        raise


def _refuse_own(path: Path) -> None:
    """Refuses what is no source but the result of one."""
    pipeline = is_pipeline(path) or is_unfinished(path)
    if pipeline or (path / CHECKPOINT_METADATA).is_file():
        raise InputError(
            f"{path}: is a {'pipeline' if pipeline else 'checkpoint'} of shardzoo already, where weights of PyTorch are"
            " read: `shardzoo export` writes it back as such"
        )


def _raise_all(weights: WeightFiles, problems: list[str]) -> None:
    if len(problems) == 1 and not weights.index:
        raise InputError(problems[0])
    fail_if(problems, f"{weights.root}: the weights of {weights.name} are not sound")


def _by_path(weights: WeightFiles, opened: list[WeightFile]) -> dict[str, WeightFile]:
    return {str(file.data.path.relative_to(weights.root)): file for file in opened}


def _open_one(
    weights: WeightFiles, name: str, options: dict[str, Any], opened: list[WeightFile], problems: list[str]
) -> None:
    path = weights.root / name
    if not os.path.exists(path):
        expected = _expected_of(weights.index, name)
        gone = "is a link to a file that is gone" if os.path.islink(path) else "is missing"
        problems.append(f"{name}: {gone}{expected}: fetch it")
        return
    try:
        opened.append(open_weight_file(path, **options))
    except InputError as error:
        problems.append(str(error))


def _expected_of(index: Index | None, name: str) -> str:
    if index is None:
        return ""
    keys = _keys_by_file(index)[name]
    return f", {len(keys)} tensors are to be in it ({batched_names(keys, 3)})"


def _keys_by_file(index: Index) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = defaultdict(list)
    for key, name in index.weight_map.items():
        keys[name].append(key)
    return keys


def _against_index(index: Index, files: Mapping[str, WeightFile]) -> list[str]:
    """The index is the truth: each file holds the tensors that it is said to hold, and no others."""
    problems = []
    expected = _keys_by_file(index)
    for name, file in files.items():
        listed = expected[name]
        absent = [key for key in listed if key not in file.tensors]
        if absent:
            problems.append(
                f"{name}: lacks {len(absent)} of the {len(listed)} tensors that {index.path.name} expects in it:"
                f" {batched_names(absent)}"
            )
        extra = [key for key in file.tensors if key not in index.weight_map]
        if extra:
            problems.append(
                f"{name}: holds {len(extra)} tensors that {index.path.name} does not list: {batched_names(extra)}"
            )
        twice = [key for key in file.tensors if index.weight_map.get(key, name) != name]
        problems.extend(
            f"{name}: holds {key!r}, which {index.path.name} places in {index.weight_map[key]}" for key in twice
        )
    return problems


def _shared_keys(files: Mapping[str, WeightFile]) -> list[str]:
    """Parts without an index must not hold the same tensor twice."""
    first: dict[str, str] = {}
    problems = []
    for name, file in files.items():
        for key in file.tensors:
            if first.setdefault(key, name) != name:
                problems.append(f"tensor {key!r} is in {first[key]} and in {name}")
    return problems
