"""What a chip holds while a model runs on a mesh, by our own arithmetic: nothing is compiled.

Weights are those of the declaration, split as it says; everything else is read off the traced program (`zoo.liveness`).
Numbers that a compiler gives differ where it keeps values in the chip's on-chip memory, or copies a weight into another
order: `audit --compile` prints them beside these.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardzoo.cli.terminal import size_text
from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.families import Family, TraceSizes, family_names, find_family
from shardzoo.zoo.layout import Param
from shardzoo.zoo.liveness import Held, held_by, tiled_bytes
from shardzoo.zoo.mesh import Degrees
from shardzoo.zoo.parts import PARTS, part_of

BAR = 36  # columns of the longest bar
MOMENTS = 8  # bytes of AdamW's two moments of a weight, float32


def part_bytes(declared: Any, degrees: Degrees, size: Callable[[Param, tuple[int, ...]], int]) -> dict[str, int]:
    """Part of the model -> the sum of `size(param, its shape on one device)`."""
    found = dict.fromkeys(PARTS, 0)
    for path, param in layout.named(declared).items():
        found[part_of(path)] += size(param, local_shape(param, degrees))
    return {part: count for part, count in found.items() if count}


def local_shape(param: Param, degrees: Degrees) -> tuple[int, ...]:
    """A parameter's shape on one device, where it is split at rest too."""
    ways = [math.prod(degrees.sizes[axis] for axis in param.axes(dim)) for dim in param.names]
    return tuple(-(-n // way) for n, way in zip(param.shape, ways, strict=True))


def weight_bytes(param: Param, shape: tuple[int, ...]) -> int:
    """Of a weight in a device's memory; none where it lies in that of the host."""
    return 0 if param.memory == "host" else tiled_bytes(shape, param.dtype.itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each chip.

    Attributes:
        weights: part of the model -> its parameters.
        unread: of the weights, those that this pass does not read (an encoder's, when it decodes).
        inputs: arguments beside the weights.
        temporaries, results: of the pass, at its worst moment.
        gradients, moments: when training.
        cache: of keys and values, or states, when generating; it is among the temporaries and results.
        where, holds: that moment, and the largest values alive in it.
    """

    weights: Mapping[str, int]
    unread: int
    inputs: int
    temporaries: int
    results: int
    gradients: int = 0
    moments: int = 0
    cache: int = 0
    where: str
    holds: tuple[tuple[str, int], ...]

    @property
    def parameters(self) -> int:
        return sum(self.weights.values())

    @property
    def program(self) -> int:
        """What a compiler's figures for this pass cover: all but weights that are not read."""
        return self.total - self.unread

    @property
    def total(self) -> int:
        return sum(bytes for _, bytes in self.bars())

    def bars(self) -> Iterator[tuple[str, int]]:
        """What stands beside each other, largest kinds first: weights by part, then the rest."""
        yield from ((f"weights: {part}", bytes) for part, bytes in self.weights.items())
        rest = {
            "gradients": self.gradients,
            "moments (AdamW)": self.moments,
            "inputs": self.inputs,
            "cache": self.cache,
            "temporaries": self.temporaries - self.cache,
            "results": self.results,
        }
        yield from ((name, bytes) for name, bytes in rest.items() if bytes)

    def to_json(self) -> dict[str, Any]:
        sums = {"parameters": self.parameters, "program": self.program, "total": self.total, "bars": dict(self.bars())}
        return dataclasses.asdict(self) | sums

    def lines(self, room: int | None) -> Iterator[str]:
        """The bars as text; `room` is the chip's memory, if one was named."""
        whole = self.total if room is None else max(room, self.total)
        share = "" if room is None else f", {self.total / room:.0%} of {size_text(room)}"
        yield f"  memory of a chip: {size_text(self.total)}{share}"
        for name, bytes in self.bars():
            if bytes >= 0.001 * self.total:
                bar = "#" * round(BAR * bytes / whole)
                yield f"    {name:22} {size_text(bytes):>10} {bytes / whole:6.1%} {bar}".rstrip()
        if self.unread:
            yield f"    of the weights this pass does not read {size_text(self.unread)}"
        if self.holds:
            yield f"    the worst moment is in {self.where}; largest then:"
            yield from (f"      {size_text(bytes):>10}  {what}"[:100] for what, bytes in self.holds[:3])


def tracing(family: Family) -> Callable:
    """What traces the family's forward pass.

    Raises:
        InputError: it has none.
    """
    if family.trace is None:
        able = ", ".join(name for name in family_names() if find_family(name).trace)
        raise InputError(f"family={family.name!r} has no forward pass to trace: {able} have")
    return family.trace


@dataclasses.dataclass(frozen=True)
class Traced:
    """A family's pass on a mesh: its jaxpr and the abstract arguments, model first."""

    jaxpr: Any
    arguments: tuple


def trace(
    family: Family,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    sizes: TraceSizes,
    *,
    train: bool = False,
    remat: str | bool = False,
) -> Traced:
    """The forward pass; with `train` also the gradients of all weights, of the mean square of what it returns.

    Raises:
        InputError: the family has no forward pass to trace, or none that takes `remat`.
    """
    options: dict[str, Any] = {"remat": remat} if train and remat else {}
    try:
        function, arguments = tracing(family)(declared, mesh, sizes, **options)
    except TypeError as error:
        if "remat" not in str(error):
            raise
        raise InputError(f"family={family.name!r} keeps all activations: leave remat out") from error
    run = _gradients(function) if train else function
    whole = (layout.abstract(declared, mesh), *arguments)
    return Traced(jax.make_jaxpr(run)(*whole).jaxpr, whole)


def _gradients(function: Callable) -> Callable:
    def loss(model: Any, *arguments: Any) -> Any:
        leaves = [x for x in jax.tree.leaves(function(model, *arguments)) if jnp.issubdtype(x.dtype, np.floating)]
        return sum(jnp.mean(jnp.square(x.astype(jnp.float32))) for x in leaves)

    return jax.grad(loss, allow_int=True)


def memory_of(declared: Any, degrees: Degrees, traced: Traced, *, train: bool = False) -> Memory:
    """Bytes on each chip of a traced pass."""
    held = held_by(traced.jaxpr)
    weights = part_bytes(declared, degrees, weight_bytes)
    count = len(layout.named(declared))
    own = list(layout.named(declared).values())
    unread = sum(weight_bytes(own[i], local_shape(own[i], degrees)) for i in held.unread if i < count)
    memory = Memory(
        weights=weights,
        unread=unread,
        inputs=sum(bytes for i, bytes in enumerate(held.inputs) if i >= count and i not in held.unread),
        temporaries=held.peak - held.results,
        results=held.results,
        where=held.where,
        holds=held.holds,
    )
    return _training(memory, declared, degrees, held) if train else memory


def _training(memory: Memory, declared: Any, degrees: Degrees, held: Held) -> Memory:
    """With gradients, which are what the pass returns, and AdamW's moments: both lie as the weights do."""
    moments = part_bytes(declared, degrees, lambda param, shape: MOMENTS * math.prod(shape))
    return dataclasses.replace(memory, gradients=held.results, results=0, moments=sum(moments.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Memory of a chip while text is generated.

    Attributes:
        cache: what is kept of the tokens so far.
        prefill, decode: bytes beside weights at the worst moment of each, the cache included.
    """

    new: int
    cache: int
    prefill: int
    decode: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self, weights: int) -> Iterator[str]:
        yield (
            f"  generating {self.new} tokens: cache {size_text(self.cache)} a chip; with weights, prefill"
            f" {size_text(weights + self.prefill)}, decode step {size_text(weights + self.decode)}"
        )


def generation_of(family: Family, declared: Any, mesh: Mesh | AbstractMesh, sizes: TraceSizes, new: int) -> Generation:
    """The memory of generating `new` tokens after prompts of the given length.

    Raises:
        InputError: the family does not generate text.
    """
    if family.text is None:
        able = ", ".join(name for name in family_names() if find_family(name).text)
        raise InputError(f"family={family.name!r} does not generate text: {able} do")
    from shardzoo.zoo.next_token import Sampling

    module: Any = importlib.import_module(family.text)
    shared: Any = importlib.import_module("shardzoo.zoo.generate")
    programs = shared._Programs(declared, mesh, None, getattr(module, "ENGINE", shared.DECODER))
    model, sampling = layout.abstract(declared, mesh), Sampling()
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sizes.batch, sizes.tokens), (sizes.batch,), (1,), ())]
    tokens, lengths, stops, until = ints
    key = jax.eval_shape(lambda: jax.random.key(0))
    start = jax.make_jaxpr(lambda *a: programs.start(*a, sampling=sampling, new=new), return_shape=True)
    begun, state = start(model, tokens, lengths, key, stops)
    advance = jax.make_jaxpr(lambda *a: programs.advance(*a, sampling=sampling))
    prefill, decode = held_by(begun.jaxpr), held_by(advance(model, state, key, stops, until).jaxpr)
    return Generation(new=new, cache=prefill.results, prefill=prefill.peak, decode=decode.peak)
