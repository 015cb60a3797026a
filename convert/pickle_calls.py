"""What the pickles inside PyTorch files may ask for: the values they are made of and a fixed table of calls.

A call is never made by name. Its name is looked up here, and what is not here is refused; the functions below only
describe what the call would have rebuilt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardzoo.convert.names import shown

RESAVE = "in PyTorch, save the tensors alone: torch.save(model.state_dict(), 'new.pth')"


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions. It stands for itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of a class that holds no weights (a path, a device, parsed arguments): only its name is kept."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """What a persistent id says of a storage: `dtype` is None for an untyped one, whose `count` is in bytes."""

    key: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class RebuiltTensor:
    """A call that would rebuild a tensor, as the pickle states it: nothing here has been checked against the file.

    `dtype` is the name of a torch dtype, or None where the storage's type decides.
    """

    storage: StorageRef
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None


class PickledSet(list):
    """A set of the pickle; members are kept in order and never hashed."""


class Refused(Exception):
    """What the pickle asks for is not done; the text says what."""


def _whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > 64:
        raise Refused(f"a tensor's {what} is a {type(values).__name__}, not a tuple of at most 64 numbers")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise Refused(f"a tensor's {what} is not made of whole numbers from 0")
    return values


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None) -> RebuiltTensor:
    if not isinstance(storage, StorageRef):
        raise Refused(f"a tensor is rebuilt over a {type(storage).__name__}, not a storage")
    (offset,) = _whole_numbers((offset,), "offset")
    size, stride = _whole_numbers(size, "size"), _whole_numbers(stride, "stride")
    if len(size) != len(stride):
        raise Refused(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    return RebuiltTensor(storage, offset, size, stride, dtype)


def _no_metadata(value: Any) -> None:
    if value is None or (isinstance(value, dict) and all(flag is False for flag in value.values())):
        return
    raise Refused("a tensor is marked as a lazy conjugate or negative (call resolve_conj() and resolve_neg() first)")


def _rebuild_v2(*args: Any) -> RebuiltTensor:
    _expect(5 <= len(args) <= 7, "_rebuild_tensor_v2", args)
    _no_metadata(args[6] if len(args) > 6 else None)
    return _rebuild(*args[:4])


def _rebuild_v3(*args: Any) -> RebuiltTensor:
    _expect(7 <= len(args) <= 8, "_rebuild_tensor_v3", args)
    _no_metadata(args[7] if len(args) > 7 else None)
    dtype = args[6]
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise Refused("a tensor's dtype is not a torch dtype")
    storage, offset, size, stride = args[:4]
    return _rebuild(storage, offset, size, stride, shown(dtype.name))


def _rebuild_v1(*args: Any) -> RebuiltTensor:
    _expect(len(args) == 4, "_rebuild_tensor", args)
    return _rebuild(*args)


def _parameter(*args: Any) -> RebuiltTensor:
    _expect(len(args) in (3, 4) and isinstance(args[0], RebuiltTensor), "_rebuild_parameter", args)
    return args[0]


_PLAIN_TENSORS = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"}
)


def _from_type(*args: Any) -> RebuiltTensor:
    """A tensor with Python attributes: (function, class, arguments, attributes)."""
    _expect(len(args) == 4 and isinstance(args[2], tuple), "_rebuild_from_type_v2", args)
    function, kind, inner, _ = args
    if not isinstance(kind, Global) or str(kind) not in _PLAIN_TENSORS:
        named = shown(str(kind)) if isinstance(kind, Global) else type(kind).__name__
        raise Refused(f"a tensor of the class {named} is asked for")
    rebuild = _REBUILD.get(str(function)) if isinstance(function, Global) else None
    if rebuild is None:
        raise Refused("a tensor is rebuilt by something that rebuilds no tensor")
    return rebuild(*inner)


def _expect(holds: bool, name: str, args: tuple[Any, ...]) -> None:
    if not holds:
        raise Refused(f"{name} is called with {len(args)} arguments of unknown meaning")


def dict_key(value: Any) -> Any:
    """A dict key that is cheap to hash and to compare.

    Nested tuples take exponential time to hash, and tuples or huge integers of equal hash can be made at will.
    """
    cheap = value is None or isinstance(value, str | float | bytes | Global)
    if not cheap and not (isinstance(value, int) and abs(value) < 2**60):
        raise Refused(f"a {type(value).__name__} is used as a dict key")
    return value


def _dict(*args: Any) -> dict[Any, Any]:
    if not args:
        return {}
    _expect(len(args) == 1 and isinstance(args[0], list | tuple | dict), "OrderedDict", args)
    if isinstance(args[0], dict):
        return dict(args[0])
    pairs = args[0]
    _expect(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs), "OrderedDict", args)
    return {dict_key(key): value for key, value in pairs}


def _default_dict(*args: Any) -> dict[Any, Any]:
    return _dict(*args[1:])


def _sequence(kind: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        _expect(len(args) <= 1 and all(isinstance(arg, tuple | list) for arg in args), kind.__name__, args)
        return kind(*args)

    return make


def _encode(*args: Any) -> bytes:
    _expect(len(args) == 2 and all(isinstance(arg, str) for arg in args), "_codecs.encode", args)
    _expect(args[1] in ("latin1", "latin-1"), "_codecs.encode", args)
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise Refused("_codecs.encode is given a string that is not Latin-1") from None


def _empty_bytes(*args: Any) -> bytes:
    _expect(not args or (len(args) == 1 and isinstance(args[0], bytes)), "bytes", args)
    return args[0] if args else b""


_NUMPY_TYPES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])


def _numpy_dtype(*args: Any) -> np.dtype:
    _expect(bool(args) and isinstance(args[0], str), "numpy.dtype", args)
    if args[0] not in _NUMPY_TYPES:
        raise Refused(f"numpy.dtype({args[0][:20]!r}) is asked for")
    return np.dtype(args[0])


def _numpy_scalar(*args: Any) -> Any:
    known = len(args) == 2 and isinstance(args[0], np.dtype) and isinstance(args[1], bytes)
    _expect(known and len(args[1]) == args[0].itemsize, "numpy scalar", args)
    return np.frombuffer(args[1], args[0])[0].item()


def _opaque(name: str) -> Callable[..., Opaque]:
    return lambda *_: Opaque(name)


_REBUILD: Mapping[str, Callable[..., RebuiltTensor]] = {
    "torch._utils._rebuild_tensor": _rebuild_v1,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    **_REBUILD,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _default_dict,
    "torch.Size": _sequence(tuple),
    "_codecs.encode": _encode,
    "numpy.dtype": _numpy_dtype,
    **{f"{module}.{name}": _sequence(kind)
       for module in ("builtins", "__builtin__")
       for name, kind in {"tuple": tuple, "list": list, "set": PickledSet, "frozenset": PickledSet}.items()},
    **{f"{module}.bytes": _empty_bytes for module in ("builtins", "__builtin__")},
    **{f"{module}.multiarray.scalar": _numpy_scalar for module in ("numpy.core", "numpy._core")},
    **{name: _opaque(name)
       for name in ("torch.device", "argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath",
                    "pathlib.PurePosixPath", "datetime.datetime", "datetime.timedelta", "_io.BytesIO", "io.BytesIO")},
}  # fmt: skip

# Tensors that PyTorch can save and that have no plain bytes to convert.
_REFUSED_KINDS: Mapping[str, str] = {
    "torch._utils._rebuild_qtensor": "a quantized tensor (call dequantize() first)",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor (call to_dense() first)",
    "torch.serialization._get_layout": "a sparse tensor (call to_dense() first)",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor (call to_dense() first)",
    "torch._utils._rebuild_nested_tensor": "a nested tensor (save its parts under names of their own)",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which holds no data (load the weights, then save)",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a wrapper class (save plain tensors)",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device (call cpu() first)",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device (call cpu() first)",
}


def call(function: Any, args: Any) -> Any:
    """What the pickle's call of `function` stands for; refuses all that rebuilds no tensor or plain value."""
    if not isinstance(function, Global):
        raise Refused(f"a {type(function).__name__} is called")
    if not isinstance(args, tuple):
        raise Refused(f"{shown(str(function))} is called with a {type(args).__name__} in place of arguments")
    name = str(function)
    if name in _REFUSED_KINDS:
        raise Refused(f"holds {_REFUSED_KINDS[name]}")
    if name not in _CALLS and name.startswith("torch.nn.modules."):
        raise Refused(f"holds a whole module (it asks for {shown(name)}, which was not called): {RESAVE}")
    if name not in _CALLS:
        raise Refused(f"asks for {shown(name)} to be called, which rebuilds no tensor and was not called: {RESAVE}")
    return _CALLS[name](*args)


def call_cost(args: Any) -> int:
    if not isinstance(args, tuple):
        return 0
    items = sum(len(arg) for arg in args if isinstance(arg, list | tuple | dict))
    return len(args) + items + sum(len(arg) // 16 for arg in args if isinstance(arg, str | bytes))


def build(target: Any, state: Any) -> Any:
    """State set on a value: dropped for a dict or an `Opaque`, checked for a numpy dtype (its byte order)."""
    if isinstance(target, dict | Opaque):
        return target
    if isinstance(target, np.dtype):
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if isinstance(order, str) and order in ("<", "|", "="):
            return target
        raise Refused("a numpy dtype that is not little-endian is asked for")
    raise Refused(f"state is set on a {shown(str(target)) if isinstance(target, Global) else type(target).__name__}")


def persistent(value: Any) -> StorageRef:
    """The storage that a persistent id names: ("storage", type, key, location, count[, view])."""
    label = value[0] if isinstance(value, tuple) and value and isinstance(value[0], str) else ""
    if label == "module" and len(value) > 1 and isinstance(value[1], Global):
        raise Refused(f"holds a whole module (it asks for {shown(str(value[1]))}, which was not called): {RESAVE}")
    if label != "storage" or len(value) not in (5, 6):
        raise Refused(f"a persistent id of unknown form is used ({label[:40]!r})")
    _, kind, key, location, count = value[:5]
    if not isinstance(kind, Global) or not isinstance(location, str):
        raise Refused("a persistent id of unknown form is used")
    if kind.module not in ("torch", "torch.cuda", "torch.storage") or not kind.name.endswith("Storage"):
        raise Refused(f"a storage of the class {shown(str(kind))} is asked for")
    if not isinstance(key, str) or len(key) > 256 or not key.isprintable():
        raise Refused("a storage has a key that is no short string")
    if location == "meta":
        raise Refused(f"holds {_REFUSED_KINDS['torch._utils._rebuild_meta_tensor_no_storage']}")
    if len(value) == 6 and value[5] is not None:
        raise Refused(f"storage {key} is a view of another (PyTorch before 0.4): load and save it with a newer PyTorch")
    if type(count) is not int or not 0 <= count < 2**60:
        raise Refused(f"storage {key} has no sound number of elements")
    return StorageRef(key, shown(kind.name), count)
