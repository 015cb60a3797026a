"""How much memory a program needs on each device beside its arguments: the largest set of values alive at once.

    held = liveness_of(function, model, tokens)      # abstract arrays will do
    held.peak, held.holds

All is read off the jaxpr; nothing is compiled. Its equations are followed in their order with the shapes of one device
(those inside `shard_map`), and of each it is known which values are alive. What decides is what a compiler leaves out:

* Elementwise operations, casts, slices, broadcasts and changes of shape are computed where they are read (fused). Such
  a value takes no memory, it keeps alive what it is computed from; unless that is more than itself and it is read more
  than once, or unless what reads it wants it in memory: a kernel, a collective, a loop, a product, a result.
* A value takes the place of one that dies where it is made, if it is no larger: of loops the carry stands once.
* A loop's stacked inputs are read where they lie; its stacked results are there from its start.
* A part of a value that is a result, or goes on to a loop's next turn, is copied out of it, so that the whole can go.
* A convolution over more than single pixels reads a copy of its input, which compilers for TPUs arrange for it.
* Pixels of fewer channels than a tile has lanes lie along the lanes themselves: what is summed over such channels is
  made in memory, in wider numbers too where it is widened, and a copy of it in another order.
* Buffers of TPUs are made of tiles of 8 x 128: the last two dims are padded to them, in whichever order
  of the dims pads least; of what is computed a last dim that fills the lanes lies along them.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from shardzoo.zoo.program import ALIAS, CAST, PRODUCTS, VIEWS, Step, Value, count, written_out

# What is made in memory of its own, whoever reads it.
_MADE = frozenset(
    (
        "dot_general", "conv_general_dilated", "pallas_call", "gather", "scatter", "scatter-add", "scatter_add", "sort",
        "top_k", "dynamic_update_slice", "scan", "while", "cond", "psum", "psum_invariant", "pmax", "pmin",
        "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute", "cumsum", "cumprod", "fft",
        "triangular_solve", "reduce_window_sum", "reduce_window_max", "argmax", "argmin",
    )
)  # fmt: skip
# What reads its operands out of memory: they are made before it.
_SHAPES = frozenset((ALIAS, "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pvary", "pcast"))
_READS = _MADE - {"gather", "cumsum", "argmax", "argmin", "dynamic_update_slice"}
# What cannot take the place of what it is made from: what is only moved, and what reads all of it for each result.
_APART = (VIEWS - {CAST}) | (_MADE - {"dynamic_update_slice", "scatter", "scatter-add"})
LANES, SUBLANES = 128, 8  # of a TPU's tile; numbers of 16 and 8 bits lie in it packed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of a program on each device, beside its arguments.

    Attributes:
        peak: bytes of temporaries and results at the worst moment.
        results: bytes of results.
        inputs: bytes of each argument's leaves.
        unread: places among the inputs that nothing reads; a compiler leaves them out.
        where: the function in whose code that moment is.
        holds: the largest values alive then: what made each, with shape and dtype, and its bytes.
    """

    peak: int
    results: int
    inputs: tuple[int, ...]
    unread: frozenset[int]
    where: str
    holds: tuple[tuple[str, int], ...]


def liveness_of(function: Callable, *arguments: Any, tiled: bool = True) -> Held:
    """The memory of `function(*arguments)`, which may be abstract; `tiled` pads buffers to a TPU's tiles."""
    return held_by(jax.make_jaxpr(function)(*arguments).jaxpr, tiled=tiled)


def held_by(jaxpr: Jaxpr, *, tiled: bool = True) -> Held:
    """The same of a traced program."""
    program = _Program(jaxpr, tiled)
    moment = program.run()
    return Held(
        peak=round(moment.size),
        results=round(sum(program.size(v) for v in program.results())),
        inputs=tuple(round(program.size(v)) for v in program.inputs),
        unread=program.unread(),
        where=moment.where,
        holds=tuple(sorted(moment.holds, key=lambda one: -one[1])[:8]),
    )


@dataclasses.dataclass(frozen=True)
class _Moment:
    """The worst moment: bytes beside those of the program's inputs."""

    size: float = 0.0
    where: str = ""
    holds: tuple[tuple[str, int], ...] = ()


class _Program:
    """A program, which of its values take memory, and what in memory (`roots`) each of the others is computed from."""

    def __init__(self, jaxpr: Jaxpr, tiled: bool, *, part: bool = False):
        self.tiled, program = tiled, written_out(jaxpr)
        self.steps, self.inputs, self.outputs = program.steps, program.inputs, program.outputs
        given = [*program.inputs, *program.constants]
        self.fixed = {id(v) for v in given}
        self.arguments = frozenset() if part else frozenset(self.fixed)  # which lie as a compiler likes best
        self.readers: dict[int, list[Step]] = collections.defaultdict(list)
        for step in self.steps:
            for value in {id(v): v for v in step.inputs}.values():
                self.readers[id(value)].append(step)
        self.roots: dict[int, frozenset[int]] = {id(v): frozenset([id(v)]) for v in given}
        self.values: dict[int, Value] = {id(v): v for v in given}
        self.made: set[int] = set()
        self.repeated: set[int] = set()  # those made by repetition of fewer numbers
        self.final: dict[tuple[int, frozenset[str]], list[Step]] = {}
        self.ordered = self._ordered() if tiled else frozenset()
        self._decide()

    def size(self, value: Value) -> float:
        """Bytes in memory."""
        dtype = value.aval.dtype
        itemsize = np.dtype(dtype).itemsize if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else 4
        return value.scale * tiled_bytes(value.aval.shape, itemsize, self.tiled, id(value) not in self.arguments)

    def results(self) -> list[Value]:
        """The values in memory that the program's results are, or are read from."""
        roots = frozenset().union(*(self.roots.get(id(v), frozenset()) for v in self.outputs))
        return [self.values[root] for root in roots - self.fixed]

    def unread(self) -> frozenset[int]:
        """Places of the inputs that no result comes from."""
        read = {id(value) for step in self.steps for value in step.inputs} | {id(value) for value in self.outputs}
        return frozenset(place for place, value in enumerate(self.inputs) if id(value) not in read)

    def _decide(self) -> None:
        """Which values are made in memory, and what each of the others is computed from."""
        results = {id(v) for v in self.outputs}
        for step in self.steps:
            roots = frozenset().union(*(self.roots.get(id(v), frozenset()) for v in step.inputs))
            made = step.name in _MADE or step.name.startswith("reduce_")
            for value in step.outputs:
                self.values[id(value)] = value
                if made or self._wanted(step, value, roots, results):
                    self.made.add(id(value))
                    self.roots[id(value)] = frozenset([id(value)])
                else:
                    self.roots[id(value)] = roots

    def _ordered(self) -> frozenset[int]:
        """What sums over few channels read, and what that is computed from in wider numbers."""
        makers = {id(v): step for step in self.steps for v in step.outputs}
        read = {id(step.inputs[0]) for step in self.steps if _over_few(step)}
        widened = {id(v) for one in read if one in makers for v in makers[one].inputs}
        return frozenset(read | {one for one in widened if one in makers and makers[one].name == CAST})

    def _wanted(self, step: Step, value: Value, roots: frozenset[int], results: set[int]) -> bool:
        """Whether a value that could be computed where it is read is made in memory all the same."""
        if not roots:
            return False
        if id(value) in self.ordered:
            return True
        readers = self._final_readers(value)
        if step.name in VIEWS and len(roots) == 1:
            source = sum(count(self.values[r].aval) for r in roots)
            return (id(value) in results and count(value.aval) < source) or self._copied(step, value, source)
        if id(value) in results or any(r.name in _READS for r in readers):
            return not (step.name == CAST and all(r.name in PRODUCTS for r in readers))
        if len(readers) < 2:
            return False
        return self.size(value) <= sum(self.size(self.values[r]) for r in roots if r not in self.fixed)

    def _copied(self, step: Step, value: Value, source: int) -> bool:
        """Whether a view of so many numbers is made.

        A part of them is for a kernel, which reads whole arrays; more than them, by repetition, for what reads memory,
        and for a change of the last dim.
        """
        direct = self.readers.get(id(value), [])
        if step.name in ("slice", "dynamic_slice") and any(
            r.name == "pallas_call" for r in self._final_readers(value, _SHAPES)
        ):
            return True
        if step.name == "reshape" and id(step.inputs[0]) in self.repeated:
            return value.aval.shape[-1:] != step.inputs[0].aval.shape[-1:]
        moved = any(r.name == "reshape" and r.outputs[0].aval.shape[-1:] != value.aval.shape[-1:] for r in direct)
        if count(value.aval) > source and (moved or any(r.name in _READS for r in direct)):
            self.repeated.add(id(value))
        return id(value) in self.repeated

    def _final_readers(self, value: Value, through: frozenset[str] = VIEWS) -> list[Step]:
        """What reads it, through views (or those of them that are named); each step once."""
        key = id(value), through
        if key not in self.final:
            found: dict[int, Step] = {}
            for reader in self.readers.get(id(value), ()):
                later = self._final_readers(reader.outputs[0], through) if reader.name in through else [reader]
                found.update((id(step), step) for step in later)
            self.final[key] = list(found.values())
        return self.final[key]

    def run(self, free: Iterable[int] = ()) -> _Moment:
        """The worst moment; inputs at the places `free` end where they are last read, which makes room."""
        loose = {id(self.inputs[place]) for place in free}
        ends: dict[int, list[int]] = collections.defaultdict(list)
        for value, at in self._last_reads().items():
            ends[at].append(value)
        alive: dict[int, float] = {}
        total = largest = 0.0
        worst: tuple = ()
        for at, step in enumerate(self.steps):
            made = [v for v in step.outputs if id(v) in self.made]
            dying = [v for v in ends[at] if v in alive or v in loose]
            fresh = sum((self.size(v) for v in made), 0.0)
            inner = self._inside(step)
            now = total + self._copy_and_result(step, fresh, dying) + inner.size
            if now > largest:
                largest, worst = now, (step, dict(alive), made, now, inner)
            alive.update((id(v), self.size(v)) for v in made)
            total += fresh
            for v in dying:
                total -= alive.pop(v, self.size(self.values[v]))
                loose.discard(v)
        return self._moment(*worst) if worst else _Moment()

    def _copy_and_result(self, step: Step, fresh: float, dying: Sequence[int]) -> float:
        """What a step adds while it runs: its results, less the place that they take of what dies here.

        Where it reads a rearranged copy, the copy is there until the results are, and what it was made from before.
        """
        copy = self._rearranged(step)
        if not copy:
            return fresh - min(fresh, self._reusable(step, dying))
        return copy + max(0.0, fresh - sum(self.size(self.values[v]) for v in dying))

    def _rearranged(self, step: Step) -> float:
        """Bytes of a copy of what a convolution reads, in the order of the matrix unit.

        And of what is summed over few channels, which do not lie along the lanes as pixels do.
        """
        if step.inputs and id(step.inputs[0]) in self.ordered and _over_few(step):
            return self.size(step.inputs[0])
        spatial = step.name == "conv_general_dilated" and count(step.inputs[1].aval) > math.prod(
            step.inputs[1].aval.shape[d] for d in step.eqn.params["dimension_numbers"].rhs_spec[:2]
        )
        return self.size(step.inputs[0]) if spatial and self.tiled else 0.0

    def _reusable(self, step: Step, dying: Sequence[int]) -> float:
        """Bytes of values that die here whose place what is made may take."""
        if step.name == "scan":
            consts, carry = step.eqn.params["num_consts"], step.eqn.params["num_carry"]
            inputs: Sequence[Value] = step.inputs[consts : consts + carry]
        elif step.name == "while":
            inputs = step.inputs[step.eqn.params["cond_nconsts"] + step.eqn.params["body_nconsts"] :]
        elif step.name in _APART:
            return 0.0
        else:
            inputs = step.inputs
        roots = frozenset().union(*(self.roots.get(id(v), frozenset()) for v in inputs))
        return sum((self.size(self.values[v]) for v in dying if v in roots), 0.0)

    def _last_reads(self) -> dict[int, int]:
        """Value in memory -> the step that reads it last; results are read after all."""
        last: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            last.update((id(v), at) for v in step.outputs if id(v) in self.made)
            for value in step.inputs:
                last.update((root, at) for root in self.roots.get(id(value), ()))
        for value in self.outputs:
            last.update((root, len(self.steps)) for root in self.roots.get(id(value), ()))
        return last

    def _moment(
        self, step: Step, alive: Mapping[int, float], made: Sequence[Value], size: float, inner: _Moment
    ) -> _Moment:
        held = dict(alive) | {id(v): self.size(v) for v in made}
        makers = {id(v): s for s in self.steps for v in s.outputs if id(v) in held}
        own = tuple((_described(makers[v], self.values[v]), round(bytes)) for v, bytes in held.items())
        return _Moment(size, inner.where or _function(step.eqn), own + inner.holds)

    def _inside(self, step: Step) -> _Moment:
        """The worst moment of a loop's body or a condition's branch, beside what the step itself reads and makes."""
        params = step.eqn.params
        if step.name == "scan":
            return self._part(params["jaxpr"]).run(
                range(params["num_consts"], params["num_consts"] + params["num_carry"])
            )
        if step.name == "while":
            body = self._part(params["body_jaxpr"])
            return body.run(range(params["body_nconsts"], len(body.inputs)))
        if step.name == "cond":
            return max((self._part(b).run() for b in params["branches"]), key=lambda one: one.size)
        return _Moment()

    def _part(self, closed: Any) -> "_Program":
        return _Program(closed.jaxpr, self.tiled, part=True)


def _over_few(step: Step) -> bool:
    """Whether it sums over a last dim that is too short for the lanes, of something with pixels."""
    if not step.name.startswith("reduce_") or "axes" not in step.eqn.params:
        return False
    shape = step.inputs[0].aval.shape
    return len(shape) >= 4 and len(shape) - 1 in step.eqn.params["axes"] and 1 < shape[-1] < LANES


@functools.lru_cache(maxsize=4096)
def tiled_bytes(shape: tuple[int, ...], itemsize: int, tiled: bool = True, computed: bool = False) -> int:
    """Bytes of an array in memory; of TPUs in tiles, along those two dims that pad least.

    Of what is computed a last dim that fills the lanes lies along them.
    """
    size = math.prod(shape) * itemsize
    if not tiled or len(shape) < 2 or size == 0:
        return size
    last = len(shape) - 1
    return min(
        size // (shape[i] * shape[j]) * (-(-shape[i] // LANES) * LANES) * (-(-shape[j] // SUBLANES) * SUBLANES)
        for i, j in itertools.permutations(range(len(shape)), 2)
        if i == last or not computed or shape[last] < LANES
    )


def _function(eqn: JaxprEqn) -> str:
    """Where in this package an equation was written: Mlp.__call__."""
    frames: Any = eqn.source_info.traceback
    codes: list[Any] = frames.raw_frames()[0] if frames else []
    for code in codes:
        if "shardzoo" in code.co_filename or "/zoo/" in code.co_filename or "/kernels/" in code.co_filename:
            return code.co_qualname.replace(".<locals>", "").replace(".<lambda>", "")
    return eqn.primitive.name


def _described(step: Step, value: Value) -> str:
    shape = ", ".join(map(str, value.aval.shape))
    return f"{_function(step.eqn)}: {np.dtype(value.aval.dtype).name}[{shape}]"
