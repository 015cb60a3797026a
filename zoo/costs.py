"""What a program asks of each device: matrix work, and collectives with their bytes. Traced, not compiled.

    costs = costs_of(forward, mesh, model, tokens)      # abstract arrays and an abstract mesh will do

All is read off the jaxpr. Inside `shard_map` its shapes are those of one device; a scan runs its body as often as it
is long; of the branches of a condition the costliest counts; a kernel counts by its own estimate. A loop of unknown
length that holds any of this cannot be counted.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from shardzoo.errors import InputError

# Kind of collective -> bytes that a device sends, as a multiple of the operand's, among n devices in a ring.
SENT: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
# Of an all-to-all most bytes pass devices on their way: over the links of each go so many times the operand's bytes.
_FORWARDED: Mapping[str, Callable[[int], float]] = {**SENT, "all-to-all": lambda n: (n * n // 4) / n}
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_UNBOUNDED = (
    "costs: a loop of unknown length holds matrix products or collectives, which cannot be counted: attention without"
    " a kernel is one; trace for TPUs, with weights in bfloat16 or float32"
)
_PASSES = {lax.Precision.HIGH: 3, lax.Precision.HIGHEST: 6}  # of the matrix unit, for products of 32-bit floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of a program that are of one kind and over the same axes.

    Attributes:
        kind: as XLA names it.
        axes: mesh axes of more than one device.
        count: how many run.
        places: in how many places of the program they stand, the body of a scan counted once.
        sent_bytes: that each device sends in all of them, in rings.
        link_bytes: the same with what it forwards for others.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    places: int
    sent_bytes: int
    link_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a program asks of each device.

    Attributes:
        flops: of matrix products, convolutions and kernels.
        passes: the same, products of 32-bit floats counted as often as a 16-bit matrix unit has to run for them.
        collectives: those over more than one device.
    """

    flops: float
    passes: float
    collectives: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.collectives)


def costs_of(function: Callable, mesh: Mesh | AbstractMesh, *arguments: Any) -> Costs:
    """The costs of `function(*arguments)`, whose `shard_map`s are over `mesh`; the arguments may be abstract.

    Raises:
        InputError: a loop of unknown length holds matrix products or collectives.
    """
    counted = _walk(jax.make_jaxpr(function)(*arguments).jaxpr, dict(mesh.shape))
    found = tuple(
        Collective(
            kind=kind,
            axes=axes,
            count=sums.count,
            places=sums.places,
            sent_bytes=round(sums.sent),
            link_bytes=round(sums.passed),
        )
        for (kind, axes), sums in sorted(counted.collectives.items())
    )
    return Costs(flops=counted.flops, passes=counted.passes, collectives=found)


@dataclasses.dataclass
class _Sums:
    count: int = 0
    places: int = 0
    sent: float = 0.0
    passed: float = 0.0


class _Count:
    """Running sums."""

    def __init__(self) -> None:
        self.flops = self.passes = 0.0
        self.collectives: dict[tuple[str, tuple[str, ...]], _Sums] = collections.defaultdict(_Sums)

    @property
    def sent(self) -> float:
        return sum((sums.sent for sums in self.collectives.values()), 0.0)

    def add(self, other: "_Count", times: int = 1) -> None:
        """Adds what a part of the program costs that runs so many times."""
        self.flops += times * other.flops
        self.passes += times * other.passes
        for key, sums in other.collectives.items():
            mine = self.collectives[key]
            mine.count += times * sums.count
            mine.places += sums.places
            mine.sent += times * sums.sent
            mine.passed += times * sums.passed


def _walk(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> _Count:
    total = _Count()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _KINDS:
            _collective(total, eqn, _KINDS[name], sizes)
        elif name == "pallas_call":
            _kernel(total, eqn)
        elif name == "cond":
            branches = [_walk(inner, sizes) for inner in _inner(eqn)]
            total.add(max(branches, key=lambda count: (count.passes, count.sent)))
        else:
            if name in ("dot_general", "conv_general_dilated"):
                _product(total, eqn)
            for inner in _inner(eqn):
                part = _walk(inner, sizes)
                if name == "while" and (part.flops or part.collectives):
                    raise InputError(_UNBOUNDED)
                total.add(part, eqn.params["length"] if name == "scan" else 1)
    return total


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs within an equation."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _shaped(aval: Any) -> jax.core.ShapedArray:
    """An operand's shape and dtype: of what is counted here it has both."""
    return aval


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _collective(total: _Count, eqn: JaxprEqn, kind: str, sizes: Mapping[str, int]) -> None:
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if sizes.get(axis, 1) > 1)
    groups = eqn.params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if n > 1:
        for operand in eqn.invars:
            sums = total.collectives[kind, axes]
            sums.count, sums.places = sums.count + 1, sums.places + 1
            sums.sent += SENT[kind](n) * _bytes(operand.aval)
            sums.passed += _FORWARDED[kind](n) * _bytes(operand.aval)


def _kernel(total: _Count, eqn: JaxprEqn) -> None:
    estimate = eqn.params["cost_estimate"]
    assert estimate is not None, f"the kernel {eqn.params.get('name')} has no cost_estimate"
    total.flops += estimate.flops
    total.passes += estimate.flops


def _product(total: _Count, eqn: JaxprEqn) -> None:
    left, right, out = (_shaped(v.aval) for v in (*eqn.invars[:2], eqn.outvars[0]))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        flops = 2 * math.prod(out.shape) * math.prod(left.shape[d] for d in contracted)
    else:
        spec = eqn.params["dimension_numbers"].rhs_spec  # out, in, window ...
        flops = 2 * math.prod(out.shape) * math.prod(right.shape[d] for d in spec[1:])
    precision = eqn.params.get("precision")
    precision = precision[0] if isinstance(precision, tuple) else precision
    wide = min(np.dtype(v.dtype).itemsize for v in (left, right)) >= 4
    total.flops += flops
    total.passes += flops * (_PASSES.get(precision, 1) if wide else 1)
