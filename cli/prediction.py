"""How long a pass takes on given chips, and what they hold, by arithmetic: which mesh to use, with nothing compiled.

The work and the collectives are those of the traced program (`zoo.costs`). Each part is taken at the chip's published
speed: matrix work at the peak of 16-bit floats, or each weight read once from HBM, whichever takes longer; then
collectives, in rings over the two links of one dim of the torus. A step's time has nothing hidden behind anything;
beside it stands how much of the links' time could be, by what depends on what. What a program does beside these is left
out, so the figures rank meshes and bound what can be reached; they are no measurement.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax._src.mesh import AbstractDevice  # what a mesh of no devices says of them has no public name
from jax.sharding import AbstractMesh, AxisType

from shardzoo.cli.chips import CHIPS, Chip, Slice
from shardzoo.cli.dimensions import stages
from shardzoo.cli.memory import Memory, memory_of, trace
from shardzoo.cli.targets import Target
from shardzoo.cli.terminal import size_text
from shardzoo.cli.verdicts import Verdict, judge, total
from shardzoo.errors import InputError
from shardzoo.kernels.outline import outlined
from shardzoo.zoo import layout
from shardzoo.zoo.costs import Collective, Costs, costs_by
from shardzoo.zoo.families import Family, TraceSizes, find_family
from shardzoo.zoo.mesh import AXES, Degrees

RINGS = 2  # links of a chip in one dim of the torus: a ring runs both ways
SHOWN = 6  # meshes in a ranking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The collectives of one kind, axes and place, in time.

    Attributes:
        seconds: of all of them.
        hidden: the most of it that work beside them could hide.
    """

    collective: Collective
    seconds: float
    hidden: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self.collective) | {"seconds": self.seconds, "hidden_seconds": self.hidden}

    def row(self) -> str:
        c = self.collective
        each = size_text(c.sent_bytes / c.count)
        where = "once" if c.runs == 1 else f"{c.runs} blocks"
        return (
            f"    {c.kind:18} {'+'.join(c.axes):10} {c.count // c.runs:>4} {where:>10} {each:>10} {c.count:>6}"
            f" {size_text(c.sent_bytes):>10} {_ms(self.seconds)} {_ms(self.hidden)}"
        )


LINKS_HEADER = (
    f"    {'collective':18} {'over':10} {'each':>4} {'in':>10} {'sends':>10} {'all':>6} {'bytes':>10} {'ms':>8}"
    f" {'can hide':>8}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One mesh of a slice that fits the model's dims.

    Attributes:
        weight_bytes: of parameters on each device, as the declaration splits them.
        memory: of all that a device holds.
        room: what a program may have on a device.
        compute, reading: seconds of matrix work; of reading the weights once.
        links: the collectives.
        utilisation: matrix work over what all chips could do in `seconds`; an upper bound.
        ticks: of a pipeline of stages, in each of which every stage works on one microbatch or waits; 1 without.
    """

    degrees: Degrees
    weight_bytes: int
    memory: Memory
    room: int
    costs: Costs
    compute: float
    reading: float
    links: tuple[Link, ...]
    utilisation: float
    ticks: int = 1

    @property
    def stage(self) -> float:
        """Seconds of the slowest stage for one microbatch: all have the same layers, and so take the same."""
        return self.seconds / self.ticks

    @property
    def fits_memory(self) -> bool:
        return self.memory.total <= self.room

    @property
    def sending(self) -> float:
        """Seconds of all collectives."""
        return sum((link.seconds for link in self.links), 0.0)

    @property
    def hidden(self) -> float:
        """The most of them that work could hide; no more than there is work."""
        return min(sum((link.hidden for link in self.links), 0.0), self.compute)

    @property
    def seconds(self) -> float:
        """Of the whole pass, with nothing hidden."""
        return max(self.compute, self.reading) + self.sending

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": str(self.degrees),
            "seconds": self.seconds,
            "seconds_with_links_hidden": self.seconds - self.hidden,
            "parameter_bytes_per_chip": self.weight_bytes,
            "memory": self.memory.to_json(),
            "room": self.room,
            "fits_memory": self.fits_memory,
            "matrix_flops_per_chip": self.costs.flops,
            "compute_seconds": self.compute,
            "compute_share_by_part": {part: n / self.costs.passes for part, n in self.costs.parts.items()},
            "weight_reading_seconds": self.reading,
            "collectives": [link.to_json() for link in self.links],
            "utilisation_bound": self.utilisation,
            "slowest_stage_seconds": self.stage,
            "ticks": self.ticks,
        }

    def row(self) -> str:
        parts = f"{_ms(self.seconds)} {_ms(self.compute)} {_ms(self.reading)} {_ms(self.sending)} {_ms(self.hidden)}"
        note = "" if self.fits_memory else " no room"
        return f"  {self.degrees!s:25} {size_text(self.memory.total):>10} {parts} {self.utilisation:5.0%}{note}"

    def lines(self) -> Iterator[str]:
        """What the mesh's step is made of."""
        yield from self.memory.lines(self.room)
        yield from self.work_lines()

    def work_lines(self) -> Iterator[str]:
        flops = f"{self.costs.flops / 1e12:.3g} TFLOP a chip, {1000 * self.compute:.1f} ms at its peak"
        yield f"  matrix work: {flops}; utilisation at most {self.utilisation:.0%}"
        if self.ticks > 1:
            yield f"  slowest stage: {1000 * self.stage:.1f} ms for a microbatch, all alike; {self.ticks} ticks a step"
        for part, passes in sorted(self.costs.parts.items(), key=lambda one: -one[1]):
            share = passes / self.costs.passes
            if share >= 0.001:
                bar = "#" * round(36 * share)
                yield f"    {part:22} {_ms(share * self.compute)} ms {share:6.1%} {bar}".rstrip()
        if self.links:
            yield f"  links: {1000 * self.sending:.1f} ms, of which {1000 * self.hidden:.1f} can hide behind work"
            yield LINKS_HEADER
            yield from (link.row() for link in sorted(self.links, key=lambda link: -link.seconds))
        else:
            yield "  links: none"


HEADER = (
    f"  {'mesh':25} {'memory':>10} {'step ms':>8} {'compute':>8} {'reading':>8} {'links':>8} {'can hide':>8}"
    f" {'bound':>5}"
)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:8.1f}" if seconds < 100 else f"{1000 * seconds:8.3g}"


def predict(
    family: Family,
    declared: Any,
    verdict: Verdict,
    where: Slice,
    sizes: TraceSizes,
    *,
    train: bool = False,
    remat: str | bool = False,
) -> Prediction:
    """What the family's forward pass takes on a mesh that fits; with `train` also its gradients.

    Raises:
        InputError: the family has no forward pass to trace, or one whose work cannot be counted.
    """
    chip, degrees = where.chip.device, verdict.degrees
    traced = trace(family, declared, abstract_mesh(degrees, chip.kind), sizes, train=train, remat=remat)
    costs = costs_by(traced.jaxpr, degrees.sizes, *traced.arguments)
    compute, reading = costs.passes / chip.flops, verdict.device_bytes / chip.hbm
    links = tuple(_link(collective, chip) for collective in costs.collectives)
    whole = max(compute, reading) + sum((link.seconds for link in links), 0.0)
    return Prediction(
        degrees=degrees,
        weight_bytes=verdict.device_bytes,
        memory=memory_of(declared, degrees, traced, train=train),
        room=chip.usable,
        costs=costs,
        compute=compute,
        reading=reading,
        links=links,
        utilisation=costs.flops / chip.flops / whole,
        ticks=ticks_of(degrees, sizes.batch),
    )


def ticks_of(degrees: Degrees, batch: int) -> int:
    """Of a pipeline with as many microbatches as stages, as far as a device's rows go, which is what is traced."""
    return degrees.pipe + min(degrees.pipe, -(-batch // degrees.data)) - 1


def _link(collective: Collective, chip: Chip) -> Link:
    seconds = collective.link_bytes / (RINGS * chip.link)
    return Link(collective=collective, seconds=seconds, hidden=min(seconds, collective.beside / chip.flops))


def abstract_mesh(degrees: Degrees, kind: str) -> AbstractMesh:
    """A mesh of TPUs that are not there, to trace on; kernels are only outlined there."""
    device = AbstractDevice(device_kind=outlined(kind), num_cores=1, platform="tpu")
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(degrees.sizes.values()), AXES, axis_types=types, abstract_device=device)


def sizes_of(family: Family, declared: Any) -> tuple[str, ...]:
    """The sizes that the family's inputs have, read off what its trace asks for; none where there is nothing to trace.

    No array is made and nothing is traced: the function alone is built.
    """
    asked: set[str] = set()

    class Asked(TraceSizes):
        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    if family.trace is not None:
        family.trace(declared, abstract_mesh(Degrees(), CHIPS["v5e"].kind), Asked())
    return tuple(field.name for field in dataclasses.fields(TraceSizes) if field.name in asked)


def check_sizes(name: str, found: Sequence[Target], given: Sequence[str]) -> None:
    """Refuses sizes that no input of these models has, where they were given.

    Raises:
        InputError: with those that their inputs have.
    """
    taken = {size for one in found for size in ("batch", *sizes_of(find_family(one.family), one.declared))}
    if wrong := [f"--{size}" for size in given if size not in taken]:
        families = " and ".join(dict.fromkeys(one.family for one in found))
        known = ", ".join(f"--{field.name}" for field in dataclasses.fields(TraceSizes) if field.name in taken)
        raise InputError(f"{name}: inputs of {families} have no {', '.join(wrong)}: leave out; they take {known}")


def meshes_of(chips: int, batch: int, pipes: Sequence[int] = (1,)) -> list[Degrees]:
    """All ways to lay out so many chips; `data` splits whole rows of the batch.

    Of stages there may be as many as `pipes` says, where a device has more than one row to pass through them.
    """
    divisors = [n for n in range(1, chips + 1) if chips % n == 0]
    return [
        Degrees(data=data, pipe=pipe, context=context, tensor=chips // data // pipe // context)
        for data, pipe, context in itertools.product(divisors, sorted(pipes), divisors)
        if chips % (data * pipe * context) == 0 and batch % data == 0 and (pipe == 1 or batch // data > 1)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something that would fit where nothing does; by the same arithmetic.

    Attributes:
        what: it is that is changed.
        degrees: the mesh that it fits on.
        memory: bytes that a chip then holds.
    """

    what: str
    degrees: Degrees
    memory: int

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "mesh": str(self.degrees), "memory": self.memory}

    def line(self) -> str:
        return f"    {self.what}: {self.degrees}, {size_text(self.memory)} a chip"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """Meshes of one slice, best first; those that fit memory before those that do not.

    Attributes:
        misfits: meshes that the model's dims do not allow, with the first reason.
        dtypes: of the weights.
        least_chips: that hold the weights between them, whatever the mesh.
        remedies: the smallest changes that would fit, where no mesh does.
        train: whether gradients are taken, and an optimizer's state is held.
    """

    where: Slice
    predictions: tuple[Prediction, ...]
    misfits: Mapping[Degrees, str]
    dtypes: frozenset[str]
    least_chips: int
    remedies: tuple[Remedy, ...] = ()
    train: bool = False

    @property
    def fits(self) -> bool:
        """Whether one of the meshes fits the chips' memory."""
        return any(p.fits_memory for p in self.predictions)

    @property
    def best(self) -> Prediction | None:
        return self.predictions[0] if self.predictions else None

    def to_json(self) -> dict[str, Any]:
        return {
            "chips": self.where.name,
            "count": self.where.chips,
            "dtypes": sorted(self.dtypes),
            "train": self.train,
            "meshes": [p.to_json() for p in self.predictions],
            "best_because": self.why(),
            "do_not_fit": {str(degrees): reason for degrees, reason in self.misfits.items()},
            "least_chips_for_the_weights": self.least_chips,
            "remedies": [remedy.to_json() for remedy in self.remedies],
        }

    def lines(self) -> Iterator[str]:
        """The ranking as text."""
        chip, pairs = self.where.chip, self.where.chip.devices > 1
        counted = f" ({self.where.devices} devices, {chip.devices} to a chip)" if pairs else ""
        yield (
            f"on {self.where.name}: {self.where.chips} chips{counted} of {chip.memory >> 30} GiB,"
            f" {chip.flops / 1e12:.0f} TFLOP/s, {chip.hbm / 1e9:.0f} GB/s, {chip.link / 1e9:.0f} GB/s a link"
        )
        if not self.predictions:
            yield "  none of these meshes fits the model's dims:"
            yield from self._misfit_lines()
            return
        what = "one forward pass and its gradients" if self.train else "one forward pass"
        yield f"{what}, nothing hidden behind anything; weights in {' and '.join(sorted(self.dtypes))}"
        yield HEADER
        yield from (p.row() for p in self.predictions[:SHOWN])
        if len(self.predictions) > SHOWN:
            yield f"  and {len(self.predictions) - SHOWN} slower ones (--json has all)"
        if self.fits:
            yield f"  best: {self.predictions[0].degrees}: {self.why()}"
        else:
            chips = f"{self.least_chips} chip{'s' * (self.least_chips > 1)}"
            yield f"  no mesh of {self.where.name} fits ({chips} for the weights alone); what would:"
            yield from (remedy.line() for remedy in self.remedies)
            if not self.remedies:
                kinds = "blocks computed again" if self.train else "8-bit weights, blocks in host memory"
                yield f"    nothing that was tried: more chips, weights split at rest, {kinds}, smaller inputs"
        yield from self._misfit_lines()

    def _misfit_lines(self) -> Iterator[str]:
        yield from (f"  not {degrees}: {reason}" for degrees, reason in self.misfits.items())

    def why(self) -> str:
        """What the best mesh's step is made of, and what the next one pays more for."""
        if not self.predictions:
            return ""
        best = self.predictions[0]
        bound = "matrix work" if best.compute >= best.reading else "reading weights"
        share = best.sending / best.seconds
        said = f"{bound} {1 - share:.0%} of the step, links {share:.0%}"
        others = [p for p in self.predictions[1:] if p.fits_memory == best.fits_memory]
        if not others:
            return said
        second = others[0]
        names = ("compute", "reading", "sending")
        more = {name: getattr(second, name) - getattr(best, name) for name in names}
        most = max(more, key=lambda name: more[name])
        words = {"compute": "of matrix work", "reading": "of reading weights", "sending": "on the links"}[most]
        slower = second.seconds / best.seconds - 1
        return f"{said}; {second.degrees} takes {slower:.0%} longer: {1000 * more[most]:.1f} ms more {words}"


def rank(
    family: Family,
    declared: Any,
    where: Slice,
    sizes: TraceSizes,
    given: Sequence[Degrees] | None = None,
    *,
    train: bool = False,
    remat: str | bool = False,
    at_rest: Callable[[Degrees], Any] | None = None,
) -> Ranking:
    """The given meshes, or all of so many chips, by predicted time; `at_rest` gives the declaration that is for a mesh.

    Raises:
        InputError: given meshes of another number of devices; as `predict`.
    """
    wrong = [str(d) for d in given or () if d.devices != where.devices]
    if wrong:
        counted = where.chips if where.chip.devices == 1 else f"{where.chips} chips of {where.devices} devices"
        raise InputError(f"chips={where.name!r} are {counted}, and mesh ({'), ('.join(wrong)}) is of another number")
    meshes = given or meshes_of(where.devices, sizes.batch, pipes_of(declared))
    verdicts = [judge(declared, degrees) for degrees in meshes]
    if at_rest is not None:
        fitting = [judge(at_rest(verdict.degrees), verdict.degrees) for verdict in verdicts if verdict.fits]
    else:
        fitting = [verdict for verdict in verdicts if verdict.fits]
    of = at_rest or (lambda _: declared)
    made = [predict(family, of(v.degrees), v, where, sizes, train=train, remat=remat) for v in fitting]
    _, size = total(declared)
    return Ranking(
        where=where,
        predictions=tuple(sorted(made, key=_order)),
        dtypes=frozenset(param.dtype.name for param in layout.named(declared).values()),
        misfits={v.degrees: v.problems[0] for v in verdicts if not v.fits},
        least_chips=math.floor(size / (where.chip.usable)) + 1,
        train=train,
    )


def pipes_of(declared: Any) -> tuple[int, ...]:
    """Numbers of stages of one mix, where the model's layers may be split over `pipe`."""
    found = stages(declared, Degrees())
    return found.degrees if found.split else (1,)


def _order(prediction: Prediction) -> tuple[bool, float]:
    """The fastest first; of those that take too much memory those that take least, after them."""
    fits = prediction.fits_memory
    return not fits, prediction.seconds if fits else float(prediction.memory.total)
