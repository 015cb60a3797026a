"""What export writes, worked out from a manifest alone: files, their headers, and where each block of values goes."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.forms import quantized_leaves
from shardzoo.checkpoints.manifest import Source, dtype_of
from shardzoo.convert.rules import Ranges
from shardzoo.convert.safetensors import DTYPES
from shardzoo.errors import fail_if

_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
_PACKED = _NAMES[DTYPES["F4"][0]]
# Path of a leaf, and which of its values ("at") are which of a tensor's ("take").
Placed = tuple[str, Mapping[str, Any]]
_ALIGN = 8  # tensors of a new file begin at multiples of this


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutPiece:
    """One block of a leaf and its place in a file.

    Attributes:
        path, at: the leaf and the block's ranges in it.
        offset: where the block's first byte goes.
        itemsize: bytes of an element.
        row_bytes, row_stride: bytes of one row of the tensor that the block fills, and of the whole row.
        packed_bytes: of a whole tensor of 4-bit elements, its bytes before two of them share one; else 0.
    """

    path: str
    at: Ranges
    offset: int
    itemsize: int
    row_bytes: int
    row_stride: int
    packed_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutFile:
    """A safetensors file to be written.

    Attributes:
        name: path below the destination.
        header: its first bytes, up to the first tensor.
        size: of the whole file.
        pieces: its values in the order of the file.
        keys: the tensors in it.
        nbytes: bytes of the tensors.
        sha256: what the whole file's must be, if it is to equal the one it came from.
        why_changed: why it need not equal that, or None.
        as_it_came: whether name and header are those of the file it came from.
    """

    name: str
    header: bytes
    size: int
    pieces: tuple[OutPiece, ...]
    keys: tuple[str, ...]
    nbytes: int
    sha256: str | None
    why_changed: str | None
    as_it_came: bool


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What stands of a tensor in a file's header."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        packed = 2 if _NAMES[self.dtype] == _PACKED else 1
        return math.prod(self.shape) * self.dtype.itemsize // packed


def files_of(checkpoint: Checkpoint) -> list[OutFile]:
    """The files that the checkpoint came from, or stand in their place.

    Raises:
        InputError: the manifest does not say where the values of a tensor are.
    """
    header = checkpoint.manifest.header
    table = header.detail["tensors"]
    skipped = {entry.key for entry in header.skipped}
    pieces = _pieces_by_key(checkpoint)
    lacking = [key for key in table if key not in skipped and header.aliases.get(key, key) not in pieces]
    fail_if([f"{key}: is in no leaf" for key in lacking], f"{checkpoint.path}: the manifest does not hold its source")
    made = []
    for number, source in enumerate(header.sources):
        all_keys = [key for key, (file, _, _) in table.items() if file == number]
        kept = [key for key in all_keys if key not in skipped]
        if kept or not all_keys:
            tensors = {key: _tensor(table[key], pieces[header.aliases.get(key, key)]) for key in kept}
            why = _why_new(source, {key: table[key][1] for key in all_keys}, tensors)
            made.append(_out_file(source, tensors, why, pieces, header.aliases))
    return made


def _why_new(source: Source, dtypes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str | None:
    """Why a file cannot have the header of the one it came from, or None."""
    if source.kind != "safetensors":
        return f"it came from a PyTorch file ({source.kind})"
    if len(dtypes) != len(tensors):
        return f"{len(dtypes) - len(tensors)} of its tensors were left out of the checkpoint"
    if source.detail.get("scaled"):
        return f"{source.detail['scaled']} of its weights had scales, and are written as their products"
    cast = sorted({tensor.dtype.name for key, tensor in tensors.items() if tensor.dtype.name != dtypes[key]})
    return f"parameters were cast to {' and '.join(cast)}" if cast else None


def cast_of(checkpoint: Checkpoint) -> str | None:
    """The dtype in which parameters are stored that came in another one, or None if all are stored as they came."""
    quantized = {values for values, _ in quantized_leaves(checkpoint.manifest.leaves).values()}
    found = {
        leaf.spec.dtype.name
        for path, leaf in checkpoint.manifest.leaves.items()
        for record in leaf.provenance
        if record["dtype"] != leaf.spec.dtype.name and path not in quantized
    }
    return ", ".join(sorted(found)) or None


def _pieces_by_key(checkpoint: Checkpoint) -> dict[str, list[Placed]]:
    found: dict[str, list[Placed]] = {}
    for path, leaf in checkpoint.manifest.all_leaves().items():
        for record in leaf.provenance:
            found.setdefault(record["key"], []).append((path, record | {"stored": leaf.spec.dtype.name}))
    return found


def _tensor(entry: list[Any], pieces: list[Placed]) -> Tensor:
    """A tensor in the dtype in which it is stored: a model restored in another one may have been saved since."""
    _, record = pieces[0]
    return Tensor(dtype_of(record["stored"]), tuple(entry[2]))


def _out_file(
    source: Source,
    tensors: Mapping[str, Tensor],
    why_new: str | None,
    pieces: Mapping[str, list[Placed]],
    aliases: Mapping[str, str],
) -> OutFile:
    placed = {key: pieces[aliases.get(key, key)] for key in tensors}
    if why_new is not None or source.header is None:
        return new_file(_safetensors_name(source.name), tensors, placed, why_new or "its header is not known")
    entries = json.loads(source.header)
    begins = {key: entries[key]["data_offsets"][0] for key in tensors}
    file = _lay_out(source.name, source.header.encode(), begins, tensors, placed)
    why_changed = None if source.sha256 else "its values were saved from a running model"
    return dataclasses.replace(file, sha256=source.sha256, why_changed=why_changed, as_it_came=True)


def new_file(name: str, tensors: Mapping[str, Tensor], pieces: Mapping[str, list[Placed]], why_changed: str) -> OutFile:
    """A file of these tensors with a header of its own; `pieces` are the blocks that make up each of them."""
    text, begins = _new_header(tensors)
    return dataclasses.replace(_lay_out(name, text, begins, tensors, pieces), why_changed=why_changed)


def _lay_out(
    name: str,
    header: bytes,
    begins: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, list[Placed]],
) -> OutFile:
    start = 8 + len(header)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    order = sorted(tensors, key=lambda key: begins[key])
    return OutFile(
        name=name,
        header=len(header).to_bytes(8, "little") + header,
        size=start + nbytes,
        pieces=tuple(p for key in order for p in _out_pieces(tensors[key], pieces[key], start + begins[key])),
        keys=tuple(tensors),
        nbytes=nbytes,
        sha256=None,
        why_changed=None,
        as_it_came=False,
    )


def _out_pieces(tensor: Tensor, pieces: list[Placed], offset: int) -> list[OutPiece]:
    """The blocks of one tensor, in the order of its rows."""
    item = tensor.dtype.itemsize
    strides = [math.prod(tensor.shape[dim + 1 :]) * item for dim in range(len(tensor.shape))]
    made = []
    for path, record in sorted(pieces, key=lambda entry: entry[1]["take"]):
        ranges = record["take"]
        row = math.prod(stop - start for start, stop in ranges[1:]) * item
        made.append(
            OutPiece(
                path=path,
                at=tuple((start, stop) for start, stop in record["at"]),
                offset=offset + sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True)),
                itemsize=item,
                row_bytes=row,
                row_stride=strides[0] if strides else row,
                packed_bytes=2 * tensor.nbytes if _NAMES[tensor.dtype] == _PACKED else 0,
            )
        )
    return made


def _new_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The JSON of a header for these tensors in this order, padded, and where each tensor begins behind it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    # The widest elements first, so that every tensor is aligned without a gap.
    for key in sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize):
        tensor = tensors[key]
        begins[key] = at
        at += tensor.nbytes
        entries[key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[key], at],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % _ALIGN), begins


def _safetensors_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.suffix == ".safetensors":
        return name
    stem = path.stem.replace("pytorch_model", "model", 1)
    return str(path.with_name(f"{stem}.safetensors"))


def index_of(files: list[OutFile]) -> bytes:
    """An index of new files, as transformers writes it."""
    weight_map = {key: file.name for file in files for key in file.keys}
    content = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
