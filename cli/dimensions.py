"""Dimension by dimension: what a mesh splits, what it repeats and what that costs, and what stops larger degrees."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from shardzoo.cli.terminal import size_text
from shardzoo.zoo import layout, schedule
from shardzoo.zoo.attention import exchange
from shardzoo.zoo.layout import LAYER, ROUND
from shardzoo.zoo.mesh import KV, PIPE, REP, Degrees
from shardzoo.zoo.parts import part_of

LARGEST = 256  # degree that is looked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dim of the model that is split.

    Attributes:
        axes: mesh axes that split it.
        ways: over how many devices the mesh splits it.
        repeats: on how many devices each part of it lies beside each other.
        divides: whether the mesh divides it; a dim over "kv" may also be a divisor of the tensor degree.
        bytes: of all parameters with it.
    """

    name: str
    size: int
    axes: tuple[str, ...]
    ways: int
    repeats: int
    divides: bool
    bytes: int

    @property
    def over(self) -> str:
        """The axes as degrees: "tensor", "kv" (tensor, where few heads repeat), "pipe" and so on."""
        names = ["tensor" if axis == REP else axis for axis in self.axes if axis != KV or self.repeats_over_rep]
        return "+".join(names)

    @property
    def by_tensor(self) -> bool:
        """Whether the tensor degree splits it."""
        return KV in self.axes

    @property
    def repeats_over_rep(self) -> bool:
        """Whether it may have fewer parts than the tensor degree, each on several ranks."""
        return self.axes == (KV,)

    @property
    def divisors(self) -> tuple[int, ...]:
        """Degrees that divide it, up to `LARGEST`."""
        return tuple(n for n in range(1, min(self.size, LARGEST) + 1) if self.size % n == 0)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"over": self.over, "divisors": self.divisors}

    def row(self) -> str:
        listed = _shortened(self.divisors)
        if not self.divides:
            state = "DOES NOT DIVIDE"
        elif self.repeats > 1:
            state = f"{self.size // self.ways} each, on {self.repeats} ranks"
        else:
            state = f"{self.size // self.ways} each" if self.ways > 1 else "whole"
        return f"  {self.name:12} {self.size:>7} {self.over:11} {self.ways:>4} {state:20} {listed}"


def _shortened(numbers: tuple[int, ...]) -> str:
    """The first and last of many numbers, in at most 40 columns."""
    text = " ".join(map(str, numbers))
    return text if len(text) <= 38 else " ".join(map(str, numbers[:9])) + " .. " + str(numbers[-1])


def dimensions(declared: Any, degrees: Degrees) -> tuple[Dimension, ...]:
    """The split dims of the model, by name and size."""
    found: dict[tuple[str, int, tuple[str, ...]], int] = {}
    for param in layout.named(declared).values():
        for dim in param.names:
            if param.axes(dim):
                key = (dim, param.size(dim), param.axes(dim))
                found[key] = found.get(key, 0) + param.nbytes
    return tuple(_dimension(*key, bytes, degrees) for key, bytes in sorted(found.items()))


def _dimension(name: str, size: int, axes: tuple[str, ...], bytes: int, degrees: Degrees) -> Dimension:
    ways = math.prod(degrees.sizes[axis] for axis in axes)
    few = axes == (KV,)
    return Dimension(
        name=name,
        size=size,
        axes=axes,
        ways=ways,
        repeats=degrees.sizes[REP] if few else 1,
        divides=size % ways == 0 and not (few and degrees.tensor % size and size % degrees.tensor),
        bytes=bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
    """What KV heads on several ranks cost each chip.

    Attributes:
        bytes: more than its share.
        work: more products by weights, as a part of what they would be.
    """

    bytes: int
    work: float


def repeated(declared: Any, degrees: Degrees) -> Repeated:
    """The cost of repeating over `rep`: a chip holds and computes rep times its share of these parameters."""
    rep = degrees.sizes[REP]
    own = {path: _device_bytes(param, degrees) for path, param in layout.named(declared).items()}
    few = sum(own[path] for paths in layout.kv_dims(declared).values() for path in paths)
    more = few * (rep - 1) / rep
    products = sum(
        own[path] for path, param in layout.named(declared).items() if param.ndim > 1 + (LAYER in param.names)
    )
    return Repeated(bytes=round(more), work=more / max(1, products - more))


def _device_bytes(param: layout.Param, degrees: Degrees) -> float:
    return param.nbytes / math.prod(degrees.sizes[axis] for dim in param.names for axis in param.axes(dim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the tensor degree may be.

    Attributes:
        exact: degrees that divide every dim, nothing repeated.
        repeating: those that fit besides, by repeating KV heads.
        binding: for the next doublings of the largest exact degree: degree -> the dims that stop it.
        beside: divisors of the query heads that do not fit -> the other dims that stop them.
    """

    exact: tuple[int, ...]
    repeating: tuple[int, ...]
    binding: dict[int, tuple[str, ...]]
    beside: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        if not self.binding:
            yield "  tensor: no dim of the model is split by it"
            return
        yield f"  tensor degrees: exact {_shortened(self.exact)}" + (
            f"; with KV heads repeated {_shortened(self.repeating)}" if self.repeating else ""
        )
        for degree, dims in self.binding.items():
            what = "what makes" if degree in self.repeating else "what stops"
            rest = " repeat heads" if degree in self.repeating else ""
            yield f"  {' and '.join(dims)} {'is' if len(dims) == 1 else 'are'} {what} tensor={degree}{rest}"
        for dims in dict.fromkeys(self.beside.values()):
            degrees = ", ".join(str(degree) for degree, of in self.beside.items() if of == dims)
            verb = "does" if len(dims) == 1 else "do"
            yield f"  the heads divide by tensor={degrees} too, where {' and '.join(dims)} {verb} not"


def limits(declared: Any, pipe: int = 1) -> Limits:
    """The tensor degrees that this model allows beside so many stages, and the dims that stop larger ones."""
    split = [d for d in dimensions(declared, Degrees(pipe=pipe)) if d.by_tensor]
    if not split:
        return Limits(exact=(), repeating=(), binding={})

    def rest(d: Dimension, degree: int) -> int:
        return d.size % (degree * (pipe if PIPE in d.axes else 1))

    def stopping(degree: int) -> list[Dimension]:
        return [d for d in split if rest(d, degree) and not (d.repeats_over_rep and degree % d.size == 0)]

    def fits(degree: int) -> bool:
        one = layout.with_kv(declared, Degrees(tensor=degree))
        return not stopping(degree) and not layout.misfits(declared, one)

    exact = tuple(t for t in range(1, LARGEST + 1) if not any(rest(d, t) for d in split)) or (1,)
    repeating = tuple(t for t in range(1, LARGEST + 1) if t not in exact and fits(t))
    whole = [n for d in split if d.name == "heads" for n in d.divisors if not rest(d, n) and n not in exact]
    beside = {n: tuple(f"{d.name}={d.size}" for d in dims) for n in whole if (dims := stopping(n))}
    binding, degree = {}, exact[-1]
    while True:
        degree *= 2
        hard = stopping(degree)
        binding[degree] = tuple(f"{d.name}={d.size}" for d in hard or split if rest(d, degree))
        if hard or degree > LARGEST:
            return Limits(exact=exact, repeating=repeating, binding=binding, beside=beside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Pipelines of this model.

    Attributes:
        stacks: what is stacked -> how many layers.
        degrees: that give every stage the same mix of layers.
        split: whether the family runs over `pipe` at all.
        pipe, microbatches: of the mesh, and of its input.
    """

    stacks: dict[str, int]
    degrees: tuple[int, ...]
    split: bool
    pipe: int
    microbatches: int

    @property
    def balanced(self) -> bool:
        return self.pipe in self.degrees

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage waits."""
        return schedule.bubble(self.pipe, self.microbatches)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"balanced": self.balanced, "bubble": self.bubble}

    def lines(self) -> Iterator[str]:
        listed = ", ".join(f"{count} {name}" for name, count in self.stacks.items())
        if not self.stacks:
            return
        allowed = "" if self.split else " (this family does not run over pipe)"
        yield f"  layers: {listed}; stages of one mix at pipe {_shortened(self.degrees)}{allowed}"
        if self.pipe > 1:
            mix = ", ".join(f"{count // self.pipe} {name}" for name, count in self.stacks.items())
            each = f"{mix} a stage" if self.balanced else "stages differ"
            yield f"  pipe={self.pipe}: {each}; idle {self.bubble:.0%} of the time, microbatches={self.microbatches}"


def stages(declared: Any, degrees: Degrees, microbatches: int = 1) -> Stages:
    """How the stacked layers fall into pipeline stages."""
    stacks: dict[str, int] = {}
    split = False
    for path, param in layout.named(declared).items():
        if LAYER in param.names:
            rounds = param.size(ROUND) if ROUND in param.names else 1
            stacks[path.partition(".")[0]] = param.size(LAYER) * rounds
            split = split or PIPE in param.axes(LAYER)
    common = math.gcd(*stacks.values()) if stacks else 1
    balanced = tuple(n for n in range(1, common + 1) if common % n == 0)
    return Stages(stacks=stacks, degrees=balanced, split=split, pipe=degrees.pipe, microbatches=microbatches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """How attention runs over `context`: split by heads, by rows, or both.

    Attributes:
        heads, kv_heads: of the model; queries and keys.
        ways: `context` falls apart into heads x rows.
        kv_repeated: whether KV heads are sent repeatedly, so that each device gets those that its queries read.
    """

    heads: int
    kv_heads: int
    tensor: int
    context: int
    ways: tuple[int, int]
    kv_repeated: bool

    @property
    def exact(self) -> bool:
        """Whether tensor x context divides the query heads."""
        return self.ways[1] == 1

    def lines(self) -> Iterator[str]:
        if self.context == 1:
            return
        by_heads, by_rows = self.ways
        own = self.heads // self.tensor
        how = f"{by_heads} over heads" + (f" x {by_rows} over rows (keys gathered)" if by_rows > 1 else "")
        more = "; KV heads sent more than once" if self.kv_repeated else ""
        yield (
            f"  attention over context={self.context}: {how}; {own} query heads a device,"
            f" tensor x context = {self.tensor * self.context} {'divides' if self.exact else 'does not divide'}"
            f" heads={self.heads}{more}"
        )


def sequence(declared: Any, degrees: Degrees) -> Sequence | None:
    """How queries and keys meet over `context`; None where the model has no heads, or they do not divide."""
    sizes = {d.name: d for d in dimensions(declared, degrees) if d.name in ("heads", "kv_heads")}
    if "heads" not in sizes or not all(d.divides for d in sizes.values()):
        return None
    heads = sizes["heads"].size
    own = heads // degrees.tensor
    kv = sizes.get("kv_heads")
    kv_heads, own_kv = (heads, own) if kv is None else (kv.size, kv.size // kv.ways)
    plan = exchange(own, own_kv, degrees.context)
    return Sequence(
        heads=heads,
        kv_heads=kv_heads,
        tensor=degrees.tensor,
        context=degrees.context,
        ways=(plan.heads, plan.rows),
        kv_repeated=plan.kv_index is not None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """All of the above for one mesh; `repeated` is None where some dim does not divide, as nothing lies on it then."""

    split: tuple[Dimension, ...]
    repeated: Repeated | None
    limits: Limits
    stages: Stages
    sequence: Sequence | None
    splits: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "dimensions": [d.to_json() for d in self.split],
            "repeated": self.repeated and dataclasses.asdict(self.repeated),
            "tensor_degrees": dataclasses.asdict(self.limits),
            "stages": self.stages.to_json(),
            "splits": self.splits,
            "attention_over_context": self.sequence
            and dataclasses.asdict(self.sequence) | {"exact": self.sequence.exact},
        }

    def lines(self) -> Iterator[str]:
        """The table, and what follows from it."""
        if self.split:
            yield f"  {'dim':12} {'size':>7} {'over':11} {'ways':>4} {'a device has':20} divisors"
            yield from (d.row() for d in self.split)
        yield from self.limits.lines()
        if self.repeated is not None and self.repeated.bytes:
            yield (
                f"  repeated KV heads: {size_text(self.repeated.bytes)} more on each chip,"
                f" {self.repeated.work:.1%} more products by weights"
            )
        yield from self.sequence.lines() if self.sequence is not None else ()
        yield from self.stages.lines()


def describe(declared: Any, degrees: Degrees, microbatches: int = 1) -> Dimensions:
    """The report on a mesh, whether it fits or not; `degrees` have their KV heads (`layout.with_kv`)."""
    split = dimensions(declared, degrees)
    return Dimensions(
        split=split,
        repeated=repeated(declared, degrees) if all(d.divides for d in split) else None,
        limits=limits(declared, degrees.pipe),
        stages=stages(declared, degrees, microbatches),
        sequence=sequence(declared, degrees),
        splits={"axes": degrees.sizes, "parts": splits(declared, degrees)},
    )


def splits(declared: Any, degrees: Degrees) -> list[dict[str, Any]]:
    """How each part of the model lies: its bytes, those of a device, and the split of its largest parameter."""
    parts: dict[str, list[layout.Param]] = {}
    for path, param in layout.named(declared).items():
        parts.setdefault(part_of(path), []).append(param)
    found = []
    for part, params in parts.items():
        largest = max(params, key=lambda param: param.nbytes)
        found.append(
            {
                "part": part,
                "bytes": sum(param.nbytes for param in params),
                "device_bytes": round(sum(_device_bytes(param, degrees) for param in params)),
                "split": {dim: list(largest.axes(dim)) for dim in largest.names if largest.axes(dim)},
            }
        )
    return sorted(found, key=lambda one: -one["bytes"])
