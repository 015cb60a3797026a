"""The mesh: five named axes, and how parallel degrees given by a user become their sizes.

| axis      | splits                                                              |
|-----------|---------------------------------------------------------------------|
| `data`    | the batch                                                           |
| `pipe`    | the stacked layers                                                  |
| `context` | the sequence                                                        |
| `kv`      | heads, mlp and vocabulary, together with `rep`; KV heads by itself  |
| `rep`     | the same, but KV heads repeat over it                               |

Tensor parallelism is `kv` x `rep`: a model with fewer KV heads than the tensor degree repeats each KV head over `rep`
without a copy of its weights in storage.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Shaped

from shardzoo.errors import InputError

DATA, PIPE, CONTEXT, KV, REP = AXES = ("data", "pipe", "context", "kv", "rep")
TP = (KV, REP)
MOST_NAMED = 8  # degrees in a message
VOCAB = (PIPE, *TP)  # what splits the tables of a model whose layers are split over `pipe`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ways each kind of parallelism splits, before any device is involved.

    `kv_heads` is the model's number of KV heads where it has fewer than query heads: it decides how `tensor`
    falls apart into the axes `kv` and `rep`.
    """

    data: int = 1
    pipe: int = 1
    context: int = 1
    tensor: int = 1
    kv_heads: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise InputError(f"mesh: {field.name}={value!r} is not a whole number of at least 1: change it")
            object.__setattr__(self, field.name, operator.index(value))  # also of numpy's whole numbers

    @property
    def kv(self) -> int:
        return self.tensor if self.kv_heads is None else math.gcd(self.tensor, self.kv_heads)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        values = (self.data, self.pipe, self.context, self.kv, self.tensor // self.kv)
        return dict(zip(AXES, values, strict=True))

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.context * self.tensor

    def __str__(self) -> str:
        names = ("data", "pipe", "context", "tensor")
        shown = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) > 1]
        return ",".join(shown) or "one device"

    @classmethod
    def of(cls, mesh: "Mesh | jax.sharding.AbstractMesh") -> "Degrees":
        """The degrees of a mesh that `make_mesh` made, or of one like it.

        Raises:
            InputError: the mesh lacks one of the five axes, or has one of a type that models do not run on.
        """
        sizes: Mapping[str, int] = dict(mesh.shape)
        missing = [axis for axis in AXES if axis not in sizes]
        if missing:
            raise InputError(f"mesh: axes {missing} are missing from {tuple(sizes)}: make it with zoo.make_mesh")
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = [axis for axis in AXES if types[axis] is AxisType.Explicit]
        if explicit:
            raise InputError(
                f"mesh: axes {explicit} are Explicit, as jax.make_mesh makes them if nothing is said: make it with"
                " zoo.make_mesh, or with axis_types of AxisType.Auto"
            )
        kv, rep = sizes[KV], sizes[REP]
        return cls(
            data=sizes[DATA],
            pipe=sizes[PIPE],
            context=sizes[CONTEXT],
            tensor=kv * rep,
            kv_heads=None if rep == 1 else kv,
        )


def make_mesh(
    *,
    data: int = 1,
    pipe: int = 1,
    context: int = 1,
    tensor: int = 1,
    kv_heads: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data * pipe * context * tensor` devices with the axes of this module.

    Neighbours along the tensor axes are neighbours in `devices` (default: the first devices of `jax.devices()`, in the
    order JAX gives them for the platform's topology when all are used).

    Raises:
        InputError: a degree below 1; more or fewer devices than the degrees need; a tensor degree that neither divides
            `kv_heads` nor is a multiple of it.
    """
    degrees = Degrees(data=data, pipe=pipe, context=context, tensor=tensor, kv_heads=kv_heads)
    problem = kv_problem("kv_heads", kv_heads, tensor) if kv_heads is not None else None
    if problem:
        raise InputError(f"make_mesh: {problem}")
    need = degrees.devices
    have = len(devices) if devices is not None else jax.device_count()
    if devices is not None and have != need:
        raise InputError(f"make_mesh: {degrees} needs {need} devices, {have} were given: pass exactly {need}")
    if have < need:
        raise InputError(
            f"make_mesh: {degrees} needs {need} devices, this process group has {have}: lower a degree"
            " (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices)"
        )
    if devices is None and have > need:
        devices = jax.devices()[:need]
    shape = tuple(degrees.sizes.values())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def kv_problem(dim: str, size: int, tensor: int) -> str | None:
    """Why `size` KV heads cannot be laid over a tensor degree, or None.

    A device holds whole KV heads: the degree divides them (a split) or is a multiple of them (each repeats over `rep`).
    """
    if size % tensor == 0 or tensor % size == 0:
        return None
    fits = [t for t in range(1, size) if size % t == 0]
    multiples = range(size, max(2 * size, tensor) + 1, size)
    fits += multiples if len(multiples) <= MOST_NAMED else multiples[-2:]  # the nearest are of most use
    return (
        f"{dim}={size} does not divide by tensor={tensor}, nor is tensor={tensor} a multiple of it:"
        f" use tensor={', '.join(map(str, fits))}"
    )


def traced_platform() -> str | None:
    """Platform of the mesh whose `shard_map` is being traced; None outside of one.

    A mesh knows its devices, also those of a topology that is compiled for without having it.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def on_host(x: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """The whole of x in every process, also where some of it lies with other processes."""
    return np.asarray(x) if x.is_fully_addressable else np.asarray(process_allgather(x, tiled=True))
