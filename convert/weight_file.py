"""Opens one weight file of any kind that can be read, told apart by its first bytes and not by its name."""

from pathlib import Path

from shardzoo.convert.file_bytes import FileBytes, Strategy
from shardzoo.convert.folder import GGUF_REMEDY
from shardzoo.convert.safetensors import SafetensorsFile, open_safetensors
from shardzoo.convert.torch_file import TorchFile, open_torch_file
from shardzoo.errors import InputError

WeightFile = SafetensorsFile | TorchFile

# (offset, bytes) -> what the file is, and what to do about it
_FOREIGN = (
    (0, b"GGUF", f"is a GGUF file, which is not read: {GGUF_REMEDY}"),
    (0, b"version https://git-lfs", "is a Git LFS pointer and not the file itself: run `git lfs pull`"),
    (0, b"\x89HDF", "is an HDF5 file: save the weights as safetensors"),
    (0, b"\x93NUMPY", "is a NumPy array: save the weights as safetensors"),
    (0, b"<!DOCTYPE", "is a web page and not the file itself: download it again"),
    (0, b"<html", "is a web page and not the file itself: download it again"),
    (0, b"\x1f\x8b", "is compressed by gzip: unpack it first"),
    (
        257,
        b"ustar",
        "is a tar archive, as PyTorch wrote before 0.1.10: load and save it with a newer PyTorch, or unpack it",
    ),
)


def open_weight_file(
    path: Path, strategy: Strategy = "auto", *, select: str | None = None, verify_crc: bool = False
) -> WeightFile:
    """Opens a safetensors or PyTorch file and checks all that it says of its tensors; none of them is read.

    `select` and `verify_crc` are for PyTorch files (see `open_torch_file`).

    Raises:
        InputError: the file is damaged, or of a kind that is not read; the message says which.
    """
    start = _first_bytes(path)
    foreign = next((what for at, mark, what in _FOREIGN if start[at : at + len(mark)] == mark), None)
    if foreign:
        raise InputError(f"{path}: {foreign}")
    # A safetensors file may begin with any byte, the low one of its header's length: look for the header itself.
    if start[8:9] == b"{" or (path.suffix == ".safetensors" and not start.startswith(b"PK\x03\x04")):
        if select is not None:
            raise InputError(
                f"{path}: select={select!r} chooses among the dicts of a PyTorch file, and this is a safetensors file:"
                " leave select (--select) out"
            )
        return open_safetensors(path, strategy)
    if start.startswith(b"PK\x03\x04") or start.startswith(b"\x80"):
        return open_torch_file(path, strategy, select=select, verify_crc=verify_crc)
    raise InputError(f"{path}: is neither a safetensors file nor one of torch.save (it begins with {start[:8]!r})")


def _first_bytes(path: Path) -> bytes:
    data = FileBytes(path, "pread")
    try:
        if data.size == 0:
            raise InputError(f"{path}: size=0: the file is empty, fetch it again")
        return data.read(0, min(512, data.size))
    finally:
        data.close()
