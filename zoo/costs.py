"""What a program asks of each device: matrix work, and collectives with their bytes. Traced, not compiled.

    costs = costs_of(forward, mesh, model, tokens)      # abstract arrays and an abstract mesh will do

All is read off the jaxpr. Inside `shard_map` its shapes are those of one device; a scan runs its body as often as it
is long; of the branches of a condition the costliest counts; a kernel counts by its own estimate. A loop of unknown
length that holds any of this cannot be counted.

Work is told by parts of the model: a product is of the part (`zoo.parts`) whose weight it multiplies by, followed
through casts, slices, gathers and loops; a kernel is of the part it is named after; all else is "activations".

What may hide a collective is told by what depends on what: the work, in the same body of the program, that neither
needs its result nor makes what it sends; of one that sends nothing but weights (gathered from a split at rest) all
work of the body, as the next turn's can be under way.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from shardzoo.errors import InputError
from shardzoo.zoo.parts import part_of
from shardzoo.zoo.program import PRODUCTS, VIEWS, Program, Step, written_out

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
_FOLLOWED = VIEWS | {"all_gather", "all_gather_invariant"}  # what a weight stays the same weight through
_KERNELS = {"attention": "attention", "delta": "delta rule"}  # word in a kernel's name -> part
ACTIVATIONS = "activations"  # work of no weights: products of activations by one another
_UNBOUNDED = (
    "costs: a loop of unknown length holds matrix products or collectives, which cannot be counted: attention without"
    " a kernel is one; trace for TPUs, with weights in bfloat16 or float32"
)
_PASSES = {lax.Precision.HIGH: 3, lax.Precision.HIGHEST: 6}  # of the matrix unit, for products of 32-bit floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of a program that are of one kind, over the same axes, and run as often in their place.

    Attributes:
        kind: as XLA names it.
        axes: mesh axes of more than one device.
        runs: how often their place runs: the length of the scan that they stand in, 1 outside of any.
        count: how many run in all.
        places: in how many places of the program they stand, the body of a scan counted once.
        sent_bytes: that each device sends in all of them, in rings.
        link_bytes: the same with what it forwards for others.
        beside: work (`Costs.passes`) that may run at the same time, in all; where several collectives may hide behind
            the same work it counts for each.
    """

    kind: str
    axes: tuple[str, ...]
    runs: int
    count: int
    places: int
    sent_bytes: int
    link_bytes: int
    beside: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a program asks of each device.

    Attributes:
        flops: of matrix products, convolutions and kernels.
        passes: the same, products of 32-bit floats counted as often as a 16-bit matrix unit has to run for them.
        parts: part of the model -> its share of the passes.
        collectives: those over more than one device.
    """

    flops: float
    passes: float
    parts: Mapping[str, float]
    collectives: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.collectives)


def costs_of(function: Callable, mesh: Mesh | AbstractMesh, *arguments: Any) -> Costs:
    """The costs of `function(*arguments)`, whose `shard_map`s are over `mesh`; the arguments may be abstract.

    The first argument is the model, where there is one: its paths say of which part a product is.

    Raises:
        InputError: a loop of unknown length holds matrix products or collectives.
    """
    return costs_by(jax.make_jaxpr(function)(*arguments).jaxpr, dict(mesh.shape), *arguments)


def costs_by(jaxpr: Jaxpr, sizes: Mapping[str, int], *arguments: Any) -> Costs:
    """The same of a program traced with these arguments, on a mesh of these sizes."""
    counted = _walk(jaxpr, sizes, [_part_of_leaf(path) for path, _ in jax.tree.leaves_with_path(arguments)])
    found = tuple(
        Collective(
            kind=kind,
            axes=axes,
            runs=runs,
            count=sums.count,
            places=sums.places,
            sent_bytes=round(sums.sent),
            link_bytes=round(sums.passed),
            beside=sums.beside,
        )
        for (kind, axes, runs), sums in sorted(counted.collectives.items())
    )
    return Costs(flops=counted.flops, passes=counted.passes, parts=dict(counted.parts), collectives=found)


def _part_of_leaf(path: tuple) -> str | None:
    """The part of a leaf of the arguments; None if it is none of the model's, or the model is one array."""
    inside = jax.tree_util.keystr(path[1:], simple=True, separator=".")
    return part_of(inside) if path[0].idx == 0 and inside else None


@dataclasses.dataclass
class _Sums:
    count: int = 0
    places: int = 0
    sent: float = 0.0
    passed: float = 0.0
    beside: float = 0.0


class _Count:
    """Running sums."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.collectives: dict[tuple[str, tuple[str, ...], int], _Sums] = collections.defaultdict(_Sums)

    @property
    def passes(self) -> float:
        return sum(self.parts.values(), 0.0)

    @property
    def sent(self) -> float:
        return sum((sums.sent for sums in self.collectives.values()), 0.0)

    def add(self, other: "_Count", times: int = 1) -> None:
        """Adds what a part of the program costs that runs so many times."""
        self.flops += times * other.flops
        for part, passes in other.parts.items():
            self.parts[part] += times * passes
        for (kind, axes, runs), sums in other.collectives.items():
            mine = self.collectives[kind, axes, runs * times]
            mine.count += times * sums.count
            mine.places += sums.places
            mine.sent += times * sums.sent
            mine.passed += times * sums.passed
            mine.beside += times * sums.beside


def _walk(jaxpr: Jaxpr, sizes: Mapping[str, int], parts: Sequence[str | None]) -> _Count:
    """The costs of a program whose inputs are weights of these parts, or none."""
    program, total = written_out(jaxpr), _Count()
    of = {id(value): part for value, part in zip(program.inputs, parts, strict=True) if part}
    depends = _Dependence(program)
    for step in program.steps:
        own = _step(step, sizes, of)
        if own is not None:
            total.add(own)
        depends.add(step, own)
        if step.name in _FOLLOWED:
            named = next((of[id(value)] for value in step.inputs if id(value) in of), None)
            of.update((id(value), named) for value in step.outputs if named)
    for step, own in depends.collectives():
        weights = all(id(value) in of for value in step.inputs)
        work = total.passes if weights else depends.beside(step)
        for key in own.collectives:
            total.collectives[key].beside += work
    return total


def _step(step: Step, sizes: Mapping[str, int], of: Mapping[int, str]) -> _Count | None:
    """What one equation costs, with the programs in it; None of most. `of` has the part of each weight, by its id."""
    own, params = _Count(), step.eqn.params
    parts = [of.get(id(value)) for value in step.inputs]
    if step.name in _KINDS:
        _collective(own, step.eqn, _KINDS[step.name], sizes)
    elif step.name == "pallas_call":
        _kernel(own, step.eqn)
    elif step.name in PRODUCTS:
        _product(own, step.eqn, next((part for part in reversed(parts) if part), ACTIVATIONS))
    elif step.name == "scan":
        own.add(_walk(params["jaxpr"].jaxpr, sizes, parts), params["length"])
    elif step.name == "cond":
        branches = [_walk(branch.jaxpr, sizes, parts[1:]) for branch in params["branches"]]
        own.add(max(branches, key=lambda count: (count.passes, count.sent)))
    elif step.name == "while":
        for inner in (params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr):
            found = _walk(inner, sizes, [None] * len(inner.invars))
            if found.flops or found.collectives:
                raise InputError(_UNBOUNDED)
    else:
        return None
    return own


class _Dependence:
    """Which steps of a program, of those that cost anything, need which others: bit i of a number is the i-th one."""

    def __init__(self, program: Program):
        self.costly: list[tuple[Step, _Count]] = []
        self.needs: list[int] = []
        self.behind: dict[int, int] = {id(value): 0 for value in program.inputs}

    def add(self, step: Step, own: _Count | None) -> None:
        """A step, and what it costs if anything."""
        needs = 0
        for value in step.inputs:
            needs |= self.behind.get(id(value), 0)
        if own is not None and (own.parts or own.collectives):
            self.needs.append(needs)
            needs |= 1 << len(self.costly)
            self.costly.append((step, own))
        self.behind.update((id(value), needs) for value in step.outputs)

    def collectives(self) -> list[tuple[Step, _Count]]:
        return [(step, own) for step, own in self.costly if step.name in _KINDS]

    def beside(self, step: Step) -> float:
        """Work of the steps that neither need this one nor are needed by it."""
        own = next(i for i, (one, _) in enumerate(self.costly) if one is step)
        apart = [
            count.passes
            for i, (_, count) in enumerate(self.costly)
            if i != own and not self.needs[i] >> own & 1 and not self.needs[own] >> i & 1
        ]
        return sum(apart, 0.0)


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
            sums = total.collectives[kind, axes, 1]
            sums.count, sums.places = sums.count + 1, sums.places + 1
            sums.sent += SENT[kind](n) * _bytes(operand.aval)
            sums.passed += _FORWARDED[kind](n) * _bytes(operand.aval)


def _kernel(total: _Count, eqn: JaxprEqn) -> None:
    estimate, name = eqn.params["cost_estimate"], str(eqn.params.get("name"))
    assert estimate is not None, f"the kernel {name} has no cost_estimate"
    total.flops += estimate.flops
    total.parts[next((part for word, part in _KERNELS.items() if word in name), ACTIVATIONS)] += estimate.flops


def _product(total: _Count, eqn: JaxprEqn, part: str) -> None:
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
    total.parts[part] += flops * (_PASSES.get(precision, 1) if wide else 1)
