"""A traced program with its calls written out: what the walks over it (`costs`, `liveness`) start from."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

ALIAS = "alias"  # the way of a value into a `shard_map` or out of it
CAST = "convert_element_type"
PRODUCTS = ("dot_general", "conv_general_dilated")
# What does not change a value's numbers, or picks some of them.
VIEWS = frozenset(
    (
        ALIAS, CAST, "reshape", "squeeze", "expand_dims", "transpose", "slice", "dynamic_slice", "rev", "copy",
        "pvary", "pcast", "stop_gradient", "optimization_barrier", "name", "sharding_constraint", "device_put",
        "reduce_precision", "broadcast_in_dim", "bitcast_convert_type", "split",
    )
)  # fmt: skip
_CALLS = frozenset(
    (
        "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
        "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map",
    )
)  # fmt: skip


class Value:
    """What a variable stands for; `scale` is this device's share of a shape outside of `shard_map`."""

    __slots__ = ("aval", "scale")

    def __init__(self, aval: Any, scale: float = 1.0):
        self.aval, self.scale = aval, scale


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation, with the values that its variables stand for."""

    eqn: JaxprEqn
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Program:
    """The equations of a jaxpr in their order, those of every call in its place.

    Loops and branches stay one step each; `part` makes programs of theirs.

    Attributes:
        inputs, constants, outputs: values.
        steps: of which a `shard_map` leaves aliases of what goes in and comes out.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.steps: list[Step] = []
        self.inputs = [Value(v.aval) for v in jaxpr.invars]
        known = dict(zip(jaxpr.invars, self.inputs, strict=True))
        self.constants = [Value(v.aval) for v in jaxpr.constvars]
        known |= dict(zip(jaxpr.constvars, self.constants, strict=True))
        self.outputs = self._write_out(jaxpr, known)
        self.steps = self._needed()

    def _needed(self) -> list[Step]:
        """The steps that a result comes from: compilers leave the others out."""
        read = {id(value) for value in self.outputs}
        kept = []
        for step in reversed(self.steps):
            if any(id(value) in read for value in step.outputs):
                read.update(id(value) for value in step.inputs)
                kept.append(step)
        return kept[::-1]

    def _write_out(self, jaxpr: Jaxpr, known: dict[Var, Value]) -> list[Value]:
        """Adds the equations; the values of the results."""

        def read(atom: Any) -> Value:
            return Value(atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            name, given = eqn.primitive.name, [read(v) for v in eqn.invars]
            inner = called(eqn) if name in _CALLS else None
            if inner is None:
                share = min((g.scale for g in given), default=1.0)
                outputs = [Value(v.aval, share) for v in eqn.outvars]
                self.steps.append(Step(eqn, name, tuple(given), tuple(outputs)))
            elif name == "shard_map":
                outputs = self._enter(eqn, inner, given)
            else:
                inside = dict(zip(inner.invars, given[len(given) - len(inner.invars) :], strict=True))
                outputs = self._write_out(inner, inside | _constants(inner))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _enter(self, eqn: JaxprEqn, inner: Jaxpr, given: Sequence[Value]) -> list[Value]:
        """A `shard_map`: values outside of it take what they take on one device."""
        inside = [Value(v.aval) for v in inner.invars]
        for value, own in zip(given, inside, strict=True):
            value.scale = count(own.aval) / max(1, count(value.aval))
            self.steps.append(Step(eqn, ALIAS, (value,), (own,)))
        known = dict(zip(inner.invars, inside, strict=True))
        results = self._write_out(inner, known | _constants(inner))
        outputs = [
            Value(v.aval, count(r.aval) / max(1, count(v.aval))) for v, r in zip(eqn.outvars, results, strict=True)
        ]
        self.steps += [Step(eqn, ALIAS, (r,), (value,)) for r, value in zip(results, outputs, strict=True)]
        return outputs


@functools.lru_cache(maxsize=32)
def written_out(jaxpr: Jaxpr) -> Program:
    """The program of a jaxpr; those met last are kept, as several walks go over the same ones in turn."""
    return Program(jaxpr)


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation calls once, if it does."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def count(aval: Any) -> int:
    """How many numbers a value has."""
    return math.prod(aval.shape)


def _constants(jaxpr: Jaxpr) -> dict[Var, Value]:
    return {v: Value(v.aval) for v in jaxpr.constvars}
