"""The one declaration per parameter, and everything that reads it.

`Module.declare(config)` gives an Equinox module with a `Param` at each leaf. The same class then has three fillings:

| filling  | leaf                              | used for                                           |
|----------|-----------------------------------|----------------------------------------------------|
| declared | `Param`                           | audit, converter rules, manifest, error messages   |
| abstract | `jax.ShapeDtypeStruct` + sharding | restore target, abstract trace, ahead-of-time compile |
| live     | `jax.Array`                       | running                                            |

A `psum` is right only if the weight before it is split on its input, so the split stands in the class that holds the
collective, and every other part of the project takes it from here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters.ad import JVPTracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from shardzoo.errors import InputError, fail_if
from shardzoo.kernels.flash_attention.options import manual_axes, varying_over
from shardzoo.zoo.differences import added_up, has_shifted, is_shifted
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.mesh import AXES, KV, PIPE, REP, Degrees, kv_problem, traced_platform

FLOAT32 = np.dtype("float32")
LAYER = "layer"  # the leading dim of stacked blocks
ROUND = "round"  # the dim before it of blocks that a pipeline runs in several rounds (`pipeline.interleaved`)
HOST = "pinned_host"  # JAX's name of host memory that devices read by themselves
Tree = TypeVar("Tree")
Other = TypeVar("Other")
Axes = str | tuple[str, ...]


def _axes(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter before it has a value.

    Attributes:
        dims: names of the dims, separated by spaces, in storage order (PyTorch's: outputs before inputs).
        shape: global sizes, one for each dim.
        split: dim -> mesh axis or axes that split it while it is used.
        dtype: storage dtype.
        rest: dim -> mesh axis that splits it further while it is not used (`split_at_rest`).
        memory: where it lies while it is not used: the devices' own memory, or that of their host (`keep_on_host`).
        fixed: whether its dtype is part of what it means, so that no cast changes it (values of a quantized weight).
    """

    dims: str
    shape: tuple[int, ...]
    split: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    dtype: np.dtype = FLOAT32
    rest: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory: Literal["device", "host"] = "device"
    fixed: bool = False

    def __post_init__(self):
        names = self.names
        if len(names) != len(self.shape) or len(set(names)) != len(names):
            raise ValueError(
                f"Param: dims {self.dims!r} do not name the {len(self.shape)} sizes {self.shape} once each"
            )
        for dim in {*self.split, *self.rest}:
            if dim not in names:
                raise ValueError(f"Param: split dim {dim!r} is not among {self.dims!r}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.dims.split())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def size(self, dim: str) -> int:
        return self.shape[self.names.index(dim)]

    def axes(self, dim: str) -> tuple[str, ...]:
        """Mesh axes over which `dim` is stored split, outermost first."""
        return _axes(self.split.get(dim, ())) + _axes(self.rest.get(dim, ()))

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(self.axes(dim) or None for dim in self.names))

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """How it lies on `mesh` while it is not used."""
        return NamedSharding(mesh, self.spec, memory_kind=HOST if self.memory == "host" else None)


def specs(declared: Tree) -> Tree:
    """The `PartitionSpec` of each leaf: the `in_specs` of a `shard_map` over a live module."""
    return jax.tree.map(lambda p: p.spec, declared)


def sharded(f: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` of `f` with what repeats checked: what a family's `forward` is made by.

    Arrays of fewer dims are broadcast in `f` also for callers whose own code must not (`jax_numpy_rank_promotion`).
    Called outside of any transformation it is compiled whole: JAX cannot run attention's rule of differentiation in a
    `shard_map` step by step. A caller's own `shard_map` over other axes of the mesh may be round a
    forward pass; JAX 0.10 cannot lower a gradient there.

    Raises:
        InputError: it is called in a `shard_map` over an axis that models split; the first array is a model of another
            form than its specs, such as one with adapters.
    """

    def one_device(*arrays: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return f(*arrays)

    around = jax.sharding.get_abstract_mesh()
    ours = [axis for axis in AXES if axis in around.manual_axes]
    if ours:
        raise InputError(
            f"shard_map: this was called in one over {', '.join(ours)}, which models split by themselves: call it"
            " outside of that, or name other axes in yours (axis_names=)"
        )
    over: dict[str, Any] = {"mesh": around, "axis_names": {*AXES}} if around.manual_axes else {"mesh": mesh}
    mapped = jax.shard_map(one_device, **over, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    def run(*arrays: Any) -> Any:
        fail_if(_of_another_form(in_specs[0], arrays[0]), "model")
        traced = any(isinstance(leaf, jax.core.Tracer) and not _forward(leaf) for leaf in jax.tree.leaves(arrays))
        return (mapped if traced else jax.jit(mapped))(*arrays)

    return run


def _of_another_form(specs: Any, model: Any) -> Iterator[str]:
    """How a live model is not of its declaration's form, where these are a model's specs."""
    if not isinstance(specs, eqx.Module):
        return
    wanted, there = set(named(specs)), set(named(model))
    for paths, what in ((there - wanted, "is not declared"), (wanted - there, "is declared, and the model has none")):
        if paths:
            hint = "take declaration and model that came together, as of adapters.attach, quantize or restore"
            yield f"{_some(sorted(paths))} {what}: {hint}"


def _forward(leaf: Any) -> bool:
    """Whether it is differentiated forwards outside of `jit`, where JAX would run it step by step."""
    return isinstance(leaf, JVPTracer) and not isinstance(leaf.primal, jax.core.Tracer)


def abstract(declared: Tree, mesh: Mesh | AbstractMesh, dtype: Any = None) -> Tree:
    """The abstract filling on `mesh`; `dtype` replaces the declared dtype of every floating-point leaf."""
    declared = astype(declared, dtype)
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding(mesh)), declared)


def named(declared: Any) -> dict[str, Any]:
    """Path ("blocks.attn.q.weight") to leaf, in tree order: what rules, manifest and messages are keyed by.

    Of a declared module the leaves are `Param`; other fillings have the same paths.
    """
    leaves = jax.tree.leaves_with_path(declared)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def fill(declared: Tree, values: Mapping[str, Any]) -> Tree:
    """The declared module with the leaf at each path replaced by `values[path]`.

    Raises:
        InputError: paths missing from `values`, or in it and not declared; all in one message.
    """
    paths = list(named(declared))
    problems = [f"{path}: declared, but there is no value for it" for path in paths if path not in values]
    problems += [f"{path}: not a parameter of this model" for path in values if path not in set(paths)]
    fail_if(problems, "fill: values do not match the declaration")
    return jax.tree.unflatten(jax.tree.structure(declared), [values[path] for path in paths])


def place(declared: Tree, mesh: Mesh, values: Tree) -> Tree:
    """The live filling from host arrays (each process holds all of them): for small models and tests.

    Raises:
        InputError: the mesh does not fit the declaration; an array of another shape, or of whole numbers where others
            are declared.
    """
    audit(declared, mesh)

    def one(param: Param, value: Any) -> Array:
        whole = not jax.numpy.issubdtype(value.dtype, np.inexact)
        if whole and jax.numpy.issubdtype(param.dtype, np.inexact):
            raise InputError(f"place: {param.dims} is of {value.dtype}, declared {param.dtype}: cast it")
        if tuple(value.shape) != param.shape:
            raise InputError(f"place: {param.dims} has shape {value.shape}, declared {param.shape}: pass that shape")
        host, sharding = np.asarray(value), param.sharding(mesh)
        return jax.make_array_from_callback(param.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, declared, values)


def _each(declared: Tree, change) -> Tree:
    return jax.tree.map(change, declared)


def astype(declared: Tree, dtype: Any) -> Tree:
    """The declaration with `dtype`, unless None, for all floating-point leaves but values of quantized weights."""
    asked = float_dtype("declare", dtype)

    def one(p: Param) -> Param:
        casts = asked is not None and jax.numpy.issubdtype(p.dtype, np.floating) and not p.fixed
        return dataclasses.replace(p, dtype=asked) if casts else p

    return _each(declared, one)


def stack(declared: Tree, layers: int, axis: str | None = None) -> Tree:
    """The declaration of `layers` equal blocks: a leading dim `layer` on each leaf, split over `axis` (`pipe`)."""
    split = {LAYER: axis} if axis else {}
    return _each(
        declared,
        lambda p: dataclasses.replace(
            p, dims=f"{LAYER} {p.dims}", shape=(layers, *p.shape), split={**split, **p.split}
        ),
    )


def split_at_rest(declared: Tree, axis: str, degrees: Degrees, *, smallest: int = 2**16) -> Tree:
    """The declaration with each large leaf also split over `axis` (`data` or `context`) while it is not in use.

    Over `data` this is what others call FSDP or ZeRO-3 (`zoo/training.py`); called for both axes, a leaf with a dim for
    each is split over both.

    Of a leaf's dims that `axis` divides, the largest one free of other splits is taken, else the largest one at all;
    leaves below `smallest` elements, or with no such dim, stay as they are. `gather_at_rest` undoes the split at the
    place of use, one block at a time; its transpose scatters the gradient.
    """
    ways = degrees.sizes[axis]

    def one(p: Param) -> Param:
        free = [d for d in p.names if d not in (ROUND, LAYER, *p.rest)]
        fits = [d for d in free if p.size(d) % (ways * _ways(p.axes(d), degrees)) == 0]
        if ways == 1 or math.prod(p.shape) < smallest or not fits or axis in p.rest.values():
            return p
        best = max(fits, key=lambda d: (not p.axes(d), p.size(d)))
        return dataclasses.replace(p, rest={**p.rest, best: axis})

    return _each(declared, one)


def keep_on_host(declared: Tree, *, smallest: int = 2**16) -> Tree:
    """The declaration with each large leaf of the stacked blocks kept in host memory while it is not in use.

    For weights larger than the devices: a block comes to its device when the scan reaches it (`gather_at_rest`), and
    the next one is under way meanwhile where the compiler overlaps the two. Leaves below `smallest` elements stay, and
    those with one dim in a block (norms, biases): TPUs cannot take one 16-bit row of a matrix out of host memory.
    """

    def one(p: Param) -> Param:
        moves = LAYER in p.names and p.ndim > 2 and math.prod(p.shape) >= smallest
        return dataclasses.replace(p, memory="host") if moves else p

    return _each(declared, one)


def on_device(live: Tree, declared: Tree) -> Tree:
    """The leaves with those that are declared in host memory on the device."""
    return jax.tree.map(
        lambda p, x: jax.device_put(x, jax.memory.Space.Device) if p.memory == "host" else x, declared, live
    )


def gather_at_rest(
    live: Tree, declared: Tree, *, to: str = "varying", narrow: Mapping[str, np.dtype] | None = None
) -> Tree:
    """The leaves as their layers use them: on the device, all-gathered over the axes that only split them at rest.

    What adapters add to a leaf as it is (`differences.Shifted`) is added first, where all of it is split alike.
    `declared` may still have the `layer` dim that a scan has taken off `live`. `to="invarying"` makes the result known
    to be equal on these axes, for activations that are too (a decode step); the gradient is scattered for "varying".

    `narrow` names leaves, by path, that their layers cast to a dtype before anything else, and that dtype: where it is
    the narrower one they are cast before they are gathered, which moves fewer bytes and gives the same. Gradients are
    scattered in the stored dtype still, so that what is added up over many devices is not rounded at each.
    """

    def one(path: Any, param: Param, value: Array) -> Array:
        names = param.names[param.ndim - value.ndim :]
        at = tuple((names.index(dim), axis) for dim, axis in param.rest.items())
        dtype = (narrow or {}).get(jax.tree_util.keystr(path, simple=True, separator="."), value.dtype)
        if at and to == "varying" and np.dtype(dtype).itemsize < value.dtype.itemsize:
            return _gathered_as(value, np.dtype(dtype), np.dtype(value.dtype), at)
        for dim, axis in at:
            value = lax.all_gather(value, axis, axis=dim, tiled=True, to=to)
        return value

    if has_shifted(declared):
        live, declared = _added_up(live, declared)
    return jax.tree.map_with_path(one, declared, on_device(live, declared))


def _added_up(live: Tree, declared: Tree) -> tuple[Tree, Tree]:
    """Both with one array for each leaf; those of `live` may have been added up before."""

    def one(param: Any, value: Any) -> Any:
        return added_up(on_device(value, param)) if is_shifted(value) else value

    live = jax.tree.map(one, declared, live, is_leaf=is_shifted)
    return live, jax.tree.map(
        lambda p: dataclasses.replace(p.leaf, memory="device") if is_shifted(p) else p, declared, is_leaf=is_shifted
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered_as(value: Array, dtype: np.dtype, stored: np.dtype, at: tuple[tuple[int, str], ...]) -> Array:
    """`value`, which is of the dtype `stored`, cast and then gathered along each (dim, axis)."""
    value = value.astype(dtype)
    for dim, axis in at:
        value = lax.all_gather(value, axis, axis=dim, tiled=True)
    return value


def _scattered(dtype: np.dtype, stored: np.dtype, at: tuple[tuple[int, str], ...], _: None, cotangent: Array) -> tuple:
    cotangent = cotangent.astype(stored)
    for dim, axis in reversed(at):
        cotangent = lax.psum_scatter(cotangent, axis, scatter_dimension=dim, tiled=True)
    return (cotangent,)


_gathered_as.defvjp(lambda *given: (_gathered_as(*given), None), _scattered)


def gather_parts(live: Tree, declared: Tree, parts: Iterable[str], *, to: str = "varying") -> Tree:
    """The model with these of its parts as `gather_at_rest` gives them; stacked blocks are gathered in their scan."""
    model: Any = live  # a module, and so a dataclass
    whole = {name: gather_at_rest(getattr(live, name), getattr(declared, name), to=to) for name in parts}
    return dataclasses.replace(model, **whole)


def after(x: Array, *done: Array) -> Array:
    """`x`, once all of `done` are there: it is chosen by a comparison that never holds.

    XLA's runtime for CPUs starts loops and branches as soon as their data are there, collectives in them too. Two that
    do not need each other start in any order, and devices that choose different ones wait for each other for ever.
    (A barrier does not help: the compiler drops it before it makes threads.)
    """
    never = functools.reduce(jnp.logical_or, [d.ravel()[0] > jnp.inf for d in done])
    return jnp.where(never, jnp.zeros((), x.dtype), x)


def in_turn(x: Tree, others: Other, *split: str) -> tuple[Tree, Other]:
    """Both as they are; on CPUs gradients of `others` go on, to be summed over the mesh, once that of `x` is there.

    For what is used beside or behind loops that `x` goes into, such as the weights of a head: else their sums and the
    loops of the backward pass, with collectives in them, stand in no order (see `after`). TPUs and GPUs have one
    anyway. In the forward pass `x` waits for those of `others` that vary over no more mesh axes than it.
    Axes in `split` are those that split what `others` are used on, and `x` not: sums over them wait as well.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if traced_platform() != "cpu" or mesh.size == 1:
        return x, others
    axes = frozenset(split).union(*(manual_axes(leaf) for leaf in jax.tree.leaves(x)))
    leaves, form = jax.tree.flatten(varying_over(others, axes))
    x, leaves = _in_turn(x, leaves)
    return x, jax.tree.unflatten(form, leaves)


@jax.custom_vjp
def _in_turn(x: Tree, others: list[Array]) -> tuple[Tree, list[Array]]:
    def waiting(x: Array) -> Array:
        done = [o for o in others if manual_axes(o) <= manual_axes(x)]
        return after(x, *done) if done else x

    return jax.tree.map(waiting, x), others


def _back_in_turn(_: None, cotangents: tuple[Tree, list[Array]]) -> tuple[Tree, list[Array]]:
    first, then = cotangents
    done = jax.tree.leaves(first)
    return first, [d if d.dtype == jax.dtypes.float0 else after(d, *done) for d in then]


_in_turn.defvjp(lambda x, others: (_in_turn(x, others), None), _back_in_turn)


def _ways(axes: Iterable[str], degrees: Degrees) -> int:
    return math.prod(degrees.sizes[axis] for axis in axes)


def kv_dims(declared: Any) -> dict[tuple[str, int], list[str]]:
    """Dims that split over `kv` alone (and so repeat over `rep`): (name, global size) -> paths of their parameters."""
    found: dict[tuple[str, int], list[str]] = {}
    for path, p in named(declared).items():
        for dim, axes in p.split.items():
            if _axes(axes) == (KV,):
                found.setdefault((dim, p.size(dim)), []).append(path)
    return found


def with_kv(declared: Any, degrees: Degrees) -> Degrees:
    """`degrees` with `kv_heads` taken from the declaration, as `make_mesh` needs it for this model."""
    sizes = [size for _, size in kv_dims(declared)]
    return dataclasses.replace(degrees, kv_heads=math.gcd(*sizes) if sizes else None)


def misfits(declared: Any, degrees: Degrees) -> list[str]:
    """Every way in which `degrees` do not fit the declaration, one line for each dim and size; empty if they fit."""
    found: dict[tuple, list[str]] = {}
    for path, param in named(declared).items():
        for dim in param.names:
            axes = param.axes(dim)
            ways = _ways(axes, degrees)
            if param.size(dim) % ways and axes != (KV,):
                found.setdefault((dim, param.size(dim), axes, ways), []).append(path)
    lines = [
        f"{_some(paths)}: {dim}={size} does not divide by {ways} ({_product(axes, degrees)})"
        + (f": use pipe={', '.join(map(str, pipe_degrees(declared)))}" if axes == (PIPE,) else "")
        for (dim, size, axes, ways), paths in found.items()
    ]
    if degrees.pipe > 1 and not any(PIPE in p.axes(dim) for p in named(declared).values() for dim in p.names):
        lines.append(f"pipe={degrees.pipe} splits nothing of this model: use pipe=1")
    return lines + _kv_misfits(declared, degrees)


def _kv_misfits(declared: Any, degrees: Degrees) -> list[str]:
    lines = []
    kv, rep = degrees.sizes[KV], degrees.sizes[REP]
    for (dim, size), paths in kv_dims(declared).items():
        problem = kv_problem(dim, size, degrees.tensor)
        if not problem and (size % kv or (size > kv and rep > 1)):
            problem = (
                f"{dim}={size} over kv={kv} x rep={rep} leaves a device without whole, matching KV heads:"
                f" make the mesh with kv_heads={size}"
            )
        lines += [f"{_some(paths)}: {problem}"] if problem else []
    return lines


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _product(axes: Iterable[str], degrees: Degrees) -> str:
    return " x ".join(f"{axis}={degrees.sizes[axis]}" for axis in axes)


def fitting(declared: Any, degrees: Degrees) -> tuple[list[int], list[Degrees]]:
    """What would fit instead: tensor degrees up to twice the one given (16 to 256), and meshes of as many devices.

    The meshes keep `pipe`, or have the nearest one below that fits, and come with the nearest tensor degree first.
    """
    limit = min(max(16, 2 * degrees.tensor), 256)

    def fits(**change: int) -> bool:
        return not misfits(declared, with_kv(declared, dataclasses.replace(degrees, **change)))

    stages = [n for n in pipe_degrees(declared) if n <= degrees.pipe and degrees.devices % (n * degrees.data) == 0]
    pipe = next((n for n in reversed(stages) if fits(tensor=1, pipe=n)), 1)
    tensors = [t for t in range(1, limit + 1) if fits(tensor=t, pipe=pipe)]
    near = sorted(tensors, key=lambda t: (abs(t - degrees.tensor), t))
    rest = {t: degrees.devices // (t * pipe * degrees.data) for t in near}
    meshes = [
        Degrees(data=degrees.data, pipe=pipe, context=rest[t], tensor=t)
        for t in near
        if rest[t] * t * pipe * degrees.data == degrees.devices
    ]
    return tensors, meshes


def pipe_degrees(declared: Any) -> list[int]:
    """Degrees of `pipe` whose stages hold equally many layers of every stack."""
    stacks = [p.size(dim) for p in named(declared).values() for dim in p.names if p.axes(dim) == (PIPE,)]
    common = math.gcd(*stacks) if stacks else 1
    return [n for n in range(1, common + 1) if common % n == 0]


def audit(declared: Any, mesh: Degrees | Mesh | AbstractMesh) -> None:
    """Checks that a mesh fits the declaration, with no device and no weight touched.

    Degrees without `kv_heads` are completed from the declaration; a `Mesh` is taken as it is.

    Raises:
        InputError: every misfit with the parameters it concerns, and the nearest meshes that fit.
    """
    given = mesh if isinstance(mesh, Degrees) else Degrees.of(mesh)
    degrees = with_kv(declared, given) if isinstance(mesh, Degrees) and given.kv_heads is None else given
    problems = misfits(declared, degrees)
    if not problems:
        return
    tensors, meshes = fitting(declared, given)
    hint = f"tensor degrees that fit: {', '.join(map(str, tensors))}"
    hint += "; meshes of the same number of devices: " + " or ".join(f"({m})" for m in meshes[:3]) if meshes else ""
    raise InputError("\n  ".join([f"mesh ({given}) does not fit this model:", *problems, hint]))
