"""The header of a safetensors file, checked before anything is read from it.

A file is 8 bytes of little-endian header length, a JSON object in UTF-8, and the tensors' bytes back to back in
row-major order. Nothing in the header is believed: every length is held against the file's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardzoo.convert.file_bytes import (
    MAX_DIMS,
    FileBytes,
    Stored,
    Strategy,
    element_count,
)
from shardzoo.convert.names import name_problem, shown
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000
# A header of 100 MB could ask for gigabytes of small JSON values; a million tensors of four dimensions stay below this.
MAX_HEADER_VALUES = 12_000_000
MAX_REPORTED = 40

# name in the header -> (element type, bits an element)
DTYPES: Mapping[str, tuple[np.dtype, int]] = {
    name: (np.dtype(kind), 4 if name == "F4" else np.dtype(kind).itemsize * 8)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F4": ml_dtypes.float4_e2m1fn,
    }.items()
}
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """One file, header read: where each tensor lies, and the header as its raw bytes."""

    data: FileBytes
    tensors: Mapping[str, Stored]
    header: bytes
    kind: str = "safetensors"
    wrapper: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_safetensors(path: Path, strategy: Strategy = "auto") -> SafetensorsFile:
    """Opens a file and checks its whole header; no tensor is read.

    Raises:
        InputError: the file is not a sound safetensors file; every problem of the header is named.
    """
    data = FileBytes(path, strategy)
    try:
        return _read_header(data)
    except InputError:
        data.close()
        raise


def _read_header(data: FileBytes) -> SafetensorsFile:
    header = _header_bytes(data)
    where = f"{data.path}: header"
    values = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_HEADER_VALUES:
        raise InputError(f"{where}: holds about {values} values, more than the {MAX_HEADER_VALUES} that are read")
    entries = parse_object(header, where)
    problems: list[str] = []
    _check_metadata(entries.pop("__metadata__", {}), problems)
    start = 8 + len(header)
    tensors = {key: entry for key in entries if (entry := _checked_entry(key, entries[key], start, problems))}
    if not problems:
        _check_coverage(tensors, start, data.size, problems)
    if len(problems) > MAX_REPORTED:
        problems[MAX_REPORTED:] = [f"and {len(problems) - MAX_REPORTED} more problems"]
    fail_if(problems, f"{data.path}: not a sound safetensors file")
    return SafetensorsFile(data=data, tensors=tensors, header=header)


def _header_bytes(data: FileBytes) -> bytes:
    if data.size < 8:
        raise InputError(
            f"{data.path}: size={data.size} is below the 8 bytes of a header length: the file is cut short"
        )
    length = int.from_bytes(data.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{data.path}: header length={length} exceeds {MAX_HEADER_BYTES}: this is not a safetensors file"
        )
    if 8 + length > data.size:
        raise InputError(
            f"{data.path}: header length={length} reaches past the end (file size={data.size}, {8 + length} needed for"
            " the header alone): the file is cut short, fetch it again"
        )
    header = data.read(8, length)
    if not header.startswith(b"{"):
        raise InputError(f"{data.path}: the header does not begin with '{{': this is not a safetensors file")
    return header


def _check_metadata(value: Any, problems: list[str]) -> None:
    if not isinstance(value, dict):
        problems.append(f"__metadata__ is a {type(value).__name__}, not an object of strings")
        return
    wrong = [key for key, text in value.items() if not isinstance(text, str)]
    problems.extend(f"__metadata__: the value of {shown(key)!r} is no string" for key in wrong[:MAX_REPORTED])


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _checked_entry(key: str, entry: Any, start: int, problems: list[str]) -> Stored | None:
    """The tensor that one header entry describes, or None with what is wrong added to `problems`."""
    problem = _entry_problem(key, entry)
    if problem:
        problems.append(f"tensor {shown(key)!r}: {problem}")
        return None
    dtype, bits = DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return Stored(
        shape=shape,
        dtype=dtype,
        offset=start + begin,
        nbytes=end - begin,
        packed=bits == 4,
    )


def _entry_problem(key: str, entry: Any) -> str | None:
    if problem := name_problem(key):
        return problem
    if not isinstance(entry, dict):
        return f"is a {type(entry).__name__}, not an object with dtype, shape and data_offsets"
    if entry.keys() != _FIELDS:
        return f"has the fields {_short(sorted(entry))}, expected {sorted(_FIELDS)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"dtype={_short(dtype)} is unknown (known: {', '.join(DTYPES)})"
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_whole, shape)):
        return f"shape={_short(shape)} is not a list of at most {MAX_DIMS} whole numbers from 0"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        return f"data_offsets={_short(offsets)} is not a pair of whole numbers from 0"
    return _size_problem(dtype, tuple(shape), *offsets)


def _short(value: Any) -> str:
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 120 else text[:117] + "..."


def _size_problem(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str | None:
    elements = element_count(shape)
    bits = DTYPES[dtype][1]
    if elements is None or elements * bits > 8 * (2**63 - 1):
        return f"shape={_short(list(shape))} x {dtype} overflows 63 bits"
    if begin > end:
        return f"data_offsets={[begin, end]} end before they begin"
    if elements * bits % 8:
        return f"shape={list(shape)} x {dtype} is {elements * bits} bits, which fill no whole number of bytes"
    if elements * bits // 8 != end - begin:
        return (
            f"data_offsets={[begin, end]} span {end - begin} bytes,"
            f" shape={list(shape)} x {dtype} needs {elements * bits // 8}"
        )
    return None


def _check_coverage(tensors: Mapping[str, Stored], start: int, size: int, problems: list[str]) -> None:
    """Tensors must follow each other without gap or overlap, from the header to the exact end of the file."""
    position = start
    previous = "the header"
    for key, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            word = "a gap" if entry.offset > position else "an overlap"
            problems.append(
                f"tensor {key!r}: begins at byte {entry.offset}, {previous} ends at {position}:"
                f" {word} of {abs(entry.offset - position)} bytes"
            )
        position = max(position, entry.offset + entry.nbytes)
        previous = f"tensor {key!r}"
    if position > size:
        short = [key for key, entry in tensors.items() if entry.nbytes and entry.offset + entry.nbytes > size]
        problems.append(
            f"file size={size}, expected {position}: {position - size} bytes are missing and {len(short)} of"
            f" {len(tensors)} tensors are cut off, {short[0]!r} among them: fetch the file again"
        )
    elif position < size:
        problems.append(f"file size={size}, expected {position}: {size - position} bytes belong to no tensor")
