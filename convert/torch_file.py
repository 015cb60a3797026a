"""PyTorch's own files (`torch.save`), read without PyTorch: the zip form and the form before 1.6.

The pickle inside runs in the closed interpreter of `unpickle`; this module gives each tensor that it describes its
place in the file, after holding sizes and strides against the storage that is really there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from shardzoo.convert.file_bytes import MAX_DIMS, FileBytes, Stored, Strategy, element_count
from shardzoo.convert.pickle_calls import RebuiltTensor, StorageRef
from shardzoo.convert.state_dict import Selected, select_tensors
from shardzoo.convert.unpickle import unpickle
from shardzoo.convert.zip_members import Member, check_crc, has_checksums, read_members
from shardzoo.errors import InputError, fail_if

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
# A view may be larger than its storage (expanded dimensions); beyond this it is not believed.
MAX_EXPANDED_BYTES = 1 << 30

_STORAGES: Mapping[str, np.dtype] = {
    f"{name}Storage": np.dtype(kind)
    for name, kind in {
        "Float": np.float32,
        "Double": np.float64,
        "Half": np.float16,
        "BFloat16": ml_dtypes.bfloat16,
        "Long": np.int64,
        "Int": np.int32,
        "Short": np.int16,
        "Char": np.int8,
        "Byte": np.uint8,
        "Bool": np.bool_,
        "ComplexFloat": np.complex64,
        "ComplexDouble": np.complex128,
        "Untyped": np.uint8,
    }.items()
}
_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "float32": np.float32,
        "float64": np.float64,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
        "float4_e2m1fn_x2": ml_dtypes.float4_e2m1fn,
        "int8": np.int8,
        "int16": np.int16,
        "int32": np.int32,
        "int64": np.int64,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "uint64": np.uint64,
        "bool": np.bool_,
        "complex64": np.complex64,
        "complex128": np.complex128,
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    """One file, pickle read: where each tensor lies, the wrapper it was found in, and what else the file holds."""

    data: FileBytes
    tensors: Mapping[str, Stored]
    kind: str
    wrapper: tuple[str, ...]
    notes: tuple[str, ...]
    header: bytes = b""


def open_torch_file(
    path: Path, strategy: Strategy = "auto", *, select: str | None = None, verify_crc: bool = False
) -> TorchFile:
    """Opens a file of `torch.save` and checks all that its pickle says of tensors; none of them is read.

    Args:
        select: path of keys to the wrapper to read, joined by "/" ("ema", "state/model"); "/" is the whole file.
        verify_crc: read every storage through and hold it against the archive's CRC-32.

    Raises:
        InputError: the file is damaged, asks for more than tensors, or leaves a doubt which of its dicts to read.
    """
    data = FileBytes(path, strategy)
    try:
        if data.read(0, min(4, data.size)) == b"PK\x03\x04":
            return _open_zip(data, select, verify_crc)
        return _open_legacy(data, select, verify_crc)
    except InputError:
        data.close()
        raise


# The zip form


def _open_zip(data: FileBytes, select: str | None, verify_crc: bool) -> TorchFile:
    members = read_members(data, lambda names: _refuse_script(data, names))
    prefix = _archive_prefix(data, members)
    pickled = members[prefix + "data.pkl"]
    checksums = has_checksums(members)
    if verify_crc and not checksums:
        raise InputError(f"{data.path}: was saved without checksums: leave verify_crc out")
    if checksums:
        check_crc(data, pickled)
    root = unpickle(data, pickled.offset, pickled.end, f"{data.path}: {pickled.name}").value
    if verify_crc:
        for member in members.values():
            check_crc(data, member)

    def locate(storage: StorageRef) -> tuple[int, int]:
        member = members.get(f"{prefix}data/{storage.key}")
        if member is None:
            raise InputError(f"storage {storage.key} is not in the archive")
        return member.offset, member.size

    return _finish(data, "pt-zip", select_tensors(root, str(data.path), select), locate)


def _refuse_script(data: FileBytes, names: list[str]) -> None:
    scripted = [name for name in names if name.endswith("/constants.pkl") or "/code/" in name]
    if scripted:
        raise InputError(
            f"{data.path}: is a TorchScript archive (it holds {scripted[0]}), which is a program and not a state dict:"
            " in PyTorch, torch.save(torch.jit.load(file).state_dict(), 'new.pth')"
        )


def _archive_prefix(data: FileBytes, members: Mapping[str, Member]) -> str:
    """The folder inside the archive that holds `data.pkl`."""
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise InputError(
            f"{data.path}: is a zip archive with {len(pickles)} data.pkl members, not a file of torch.save"
        )
    prefix = pickles[0].removesuffix("data.pkl")
    order = members.get(prefix + "byteorder")
    if order is not None and (order.size > 16 or data.read(order.offset, order.size) != b"little"):
        raise InputError(f"{data.path}: is big-endian: load and save it again on a little-endian machine")
    return prefix


# The form before PyTorch 1.6: five pickles, then each storage as its element count and its bytes


def _open_legacy(data: FileBytes, select: str | None, verify_crc: bool) -> TorchFile:
    position = _legacy_preamble(data)
    root = unpickle(data, position, data.size, str(data.path))
    listed = unpickle(data, root.end, data.size, f"{data.path}: list of storages")
    keys = listed.value
    if verify_crc:
        raise InputError(f"{data.path}: the format before PyTorch 1.6 holds no checksums: leave verify_crc out")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"{data.path}: the list of storages is not a list of strings: the file is damaged")
    selected = select_tensors(root.value, str(data.path), select)
    places = _legacy_places(data, keys, listed.end, root.storages)

    def locate(storage: StorageRef) -> tuple[int, int]:
        if storage.key not in places:
            raise InputError(f"storage {storage.key} is not in the file")
        return places[storage.key]

    return _finish(data, "pt-legacy", selected, locate)


def _legacy_preamble(data: FileBytes) -> int:
    """Checks the three pickles in front of the object; returns where the object's begins."""
    where = str(data.path)
    magic = unpickle(data, 0, data.size, where)
    if type(magic.value) is not int or magic.value != LEGACY_MAGIC:
        raise InputError(f"{where}: is a pickle, but not one that torch.save wrote")
    protocol = unpickle(data, magic.end, data.size, where)
    if type(protocol.value) is not int or protocol.value != LEGACY_PROTOCOL:
        raise InputError(f"{where}: the protocol is not {LEGACY_PROTOCOL}: no released PyTorch wrote this")
    system = unpickle(data, protocol.end, data.size, where)
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise InputError(f"{where}: is big-endian: load and save it again on a little-endian machine")
    return system.end


def _legacy_places(
    data: FileBytes, keys: list[str], position: int, storages: Mapping[str, StorageRef]
) -> dict[str, tuple[int, int]]:
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None or key in places:
            raise InputError(
                f"{data.path}: storage {key[:40]!r} is listed twice or used by nothing: the file is damaged"
            )
        try:
            size = storage.count * _storage_dtype(storage).itemsize
        except InputError as error:
            raise InputError(f"{data.path}: storage {key[:40]!r}: {error}") from None
        if position + 8 + size > data.size:
            raise InputError(
                f"{data.path}: size={data.size}: storage {key[:40]!r} needs {size} bytes from byte {position + 8}:"
                " the file is cut short, fetch it again"
            )
        count = int.from_bytes(data.read(position, 8), "little", signed=True)
        if count != storage.count:
            raise InputError(
                f"{data.path}: storage {key[:40]!r} holds {count} elements, its tensors expect {storage.count}"
            )
        places[key] = (position + 8, size)
        position += 8 + size
    if position != data.size:
        raise InputError(f"{data.path}: size={data.size}, expected {position}: the rest belongs to no storage")
    return places


# Geometry, the same for both


def _finish(
    data: FileBytes, kind: str, selected: Selected, locate: Callable[[StorageRef], tuple[int, int]]
) -> TorchFile:
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for key, tensor in selected.tensors.items():
        try:
            tensors[key] = _place(tensor, *locate(tensor.storage))
        except InputError as error:
            problems.append(f"tensor {key!r}: {error}")
        if len(problems) >= 20:
            break
    fail_if(problems, f"{data.path}: tensors do not fit the file")
    return TorchFile(data=data, tensors=tensors, kind=kind, wrapper=selected.wrapper, notes=tuple(selected.notes))


def _storage_dtype(storage: StorageRef) -> np.dtype:
    if storage.kind.startswith(("QInt", "QUInt")):
        raise InputError("is quantized: call dequantize() before saving")
    if storage.kind not in _STORAGES:
        raise InputError(f"{storage.kind} is not a type of storage that can be read")
    return _STORAGES[storage.kind]


def _place(tensor: RebuiltTensor, offset: int, size: int) -> Stored:
    """A tensor's place, given where its storage begins and how many bytes are there."""
    storage = tensor.storage
    stated = storage.count * _storage_dtype(storage).itemsize
    if stated != size:
        raise InputError(f"storage {storage.key} is {size} bytes, {storage.count} x {storage.kind} needs {stated}")
    if tensor.dtype is not None and tensor.dtype not in _DTYPES:
        raise InputError(f"dtype {tensor.dtype} cannot be read (known: {', '.join(_DTYPES)})")
    dtype = _DTYPES[tensor.dtype] if tensor.dtype else _storage_dtype(storage)
    elements = element_count(tensor.size)
    if elements is None or elements * dtype.itemsize >= 2**63 or len(tensor.size) > MAX_DIMS:
        raise InputError(f"size={list(tensor.size)} overflows 63 bits or {MAX_DIMS} dimensions")
    span = sum((n - 1) * step for n, step in zip(tensor.size, tensor.stride, strict=True)) + 1 if elements else 0
    end = (tensor.offset + span) * dtype.itemsize
    if end > size:
        raise InputError(
            f"size={list(tensor.size)} stride={list(tensor.stride)} offset={tensor.offset} reaches byte {end},"
            f" storage {storage.key} has {size}"
        )
    nbytes = elements * dtype.itemsize
    if nbytes > max(size, MAX_EXPANDED_BYTES):
        raise InputError(f"size={list(tensor.size)} is {nbytes} bytes made of a storage of {size}: save a copy instead")
    return _stored(tensor, dtype, offset + tensor.offset * dtype.itemsize, nbytes)


def _stored(tensor: RebuiltTensor, dtype: np.dtype, offset: int, nbytes: int) -> Stored:
    shape, key = tensor.size, tensor.storage.key
    row_major = nbytes == 0 or _is_row_major(shape, tensor.stride)
    if tensor.dtype == "float4_e2m1fn_x2":
        if not row_major or not shape:
            raise InputError("is a strided view of packed 4-bit floats: call contiguous() before saving")
        shape = (*shape[:-1], 2 * shape[-1])  # one torch element is a pair
        return Stored(shape=shape, dtype=dtype, offset=offset, nbytes=nbytes, packed=True, storage=key)
    strides = None if row_major else tuple(step * dtype.itemsize for step in tensor.stride)
    return Stored(shape=shape, dtype=dtype, offset=offset, nbytes=nbytes, strides=strides, storage=key)


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return all(n == 1 or step == want for n, step, want in zip(shape, stride, expected, strict=True))
