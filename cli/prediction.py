"""How long a forward pass takes on given chips, by arithmetic: which mesh to use, before anything is compiled.

The work and the collectives are those of the traced program (`zoo.costs`). Each part is taken at the chip's published
speed and nothing is hidden behind anything else: matrix work at the peak of 16-bit floats, or each weight read once
from HBM, whichever takes longer; then collectives, in rings over the two links of one dim of the torus. What a program
does beside these is left out, so the figures rank meshes and bound what can be reached; they are no measurement.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax._src.mesh import AbstractDevice  # what a mesh of no devices says of them has no public name
from jax.sharding import AbstractMesh, AxisType

from shardzoo.cli.audit import Verdict, judge, total
from shardzoo.cli.chips import Slice
from shardzoo.cli.terminal import size_text
from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.costs import Collective, Costs, costs_of
from shardzoo.zoo.families import Family, TraceSizes, family_names, find_family
from shardzoo.zoo.mesh import AXES, Degrees

RINGS = 2  # links of a chip in one dim of the torus: a ring runs both ways
SHOWN = 6  # meshes in a ranking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One mesh of a slice that fits the model's dims.

    Attributes:
        weight_bytes: of parameters on each chip.
        fits_memory: whether they are less than its memory.
        compute, reading: seconds of matrix work; of reading the weights once.
        links: seconds of each collective.
        utilisation: matrix work over what all chips could do in `seconds`; an upper bound.
    """

    degrees: Degrees
    weight_bytes: int
    fits_memory: bool
    costs: Costs
    compute: float
    reading: float
    links: tuple[tuple[Collective, float], ...]
    utilisation: float

    @property
    def sending(self) -> float:
        """Seconds of all collectives."""
        return sum((seconds for _, seconds in self.links), 0.0)

    @property
    def seconds(self) -> float:
        """Of the whole pass."""
        return max(self.compute, self.reading) + self.sending

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": str(self.degrees),
            "seconds": self.seconds,
            "parameter_bytes_per_chip": self.weight_bytes,
            "parameters_fit_memory": self.fits_memory,
            "matrix_flops_per_chip": self.costs.flops,
            "compute_seconds": self.compute,
            "weight_reading_seconds": self.reading,
            "collectives": [dataclasses.asdict(c) | {"seconds": seconds} for c, seconds in self.links],
            "utilisation_bound": self.utilisation,
        }

    def row(self) -> str:
        parts = f"{_ms(self.seconds)} {_ms(self.compute)} {_ms(self.reading)} {_ms(self.sending)}"
        note = "" if self.fits_memory else "  weights exceed the chip's memory"
        return f"  {self.degrees!s:30} {size_text(self.weight_bytes):>10} {parts} {self.utilisation:6.0%}{note}"


HEADER = f"  {'mesh':30} {'weights':>10} {'step ms':>9} {'compute':>9} {'reading':>9} {'links':>9} {'bound':>6}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9.1f}"


def predict(family: Family, declared: Any, verdict: Verdict, where: Slice, sizes: TraceSizes) -> Prediction:
    """What the family's forward pass takes on a mesh that fits.

    Raises:
        InputError: the family has no forward pass to trace.
    """
    if family.trace is None:
        able = ", ".join(name for name in family_names() if find_family(name).trace)
        raise InputError(f"family={family.name!r} has no forward pass to trace: {able} have")
    chip, degrees = where.chip, verdict.degrees
    mesh = abstract_mesh(degrees, chip.kind)
    function, arguments = family.trace(declared, mesh, sizes)
    costs = costs_of(function, mesh, layout.abstract(declared, mesh), *arguments)
    compute, reading = costs.passes / chip.flops, verdict.device_bytes / chip.hbm
    links = tuple((c, c.link_bytes / (RINGS * chip.link)) for c in costs.collectives)
    whole = max(compute, reading) + sum(seconds for _, seconds in links)
    return Prediction(
        degrees=degrees,
        weight_bytes=verdict.device_bytes,
        fits_memory=verdict.device_bytes < chip.memory,
        costs=costs,
        compute=compute,
        reading=reading,
        links=links,
        utilisation=costs.flops / chip.flops / whole,
    )


def abstract_mesh(degrees: Degrees, kind: str) -> AbstractMesh:
    """A mesh of TPUs that are not there, to trace on."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(degrees.sizes.values()), AXES, axis_types=types, abstract_device=device)


def meshes_of(chips: int, batch: int) -> list[Degrees]:
    """All ways to lay out so many chips, `pipe` apart; `data` splits whole rows of the batch."""
    divisors = [n for n in range(1, chips + 1) if chips % n == 0]
    return [
        Degrees(data=data, context=context, tensor=chips // data // context)
        for data, context in itertools.product(divisors, divisors)
        if chips % (data * context) == 0 and batch % data == 0
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """Meshes of one slice, best first; those that fit memory before those that do not.

    Attributes:
        misfits: meshes that the model's dims do not allow, with the first reason.
        dtypes: of the weights.
        least_chips: that hold the weights between them, whatever the mesh.
    """

    where: Slice
    predictions: tuple[Prediction, ...]
    misfits: Mapping[Degrees, str]
    dtypes: frozenset[str]
    least_chips: int

    @property
    def fits(self) -> bool:
        """Whether one of the meshes holds the weights."""
        return any(p.fits_memory for p in self.predictions)

    def to_json(self) -> dict[str, Any]:
        return {
            "chips": self.where.name,
            "count": self.where.chips,
            "dtypes": sorted(self.dtypes),
            "meshes": [p.to_json() for p in self.predictions],
            "do_not_fit": {str(degrees): reason for degrees, reason in self.misfits.items()},
            "least_chips_for_the_weights": self.least_chips,
        }

    def lines(self) -> Iterator[str]:
        """The ranking as text."""
        chip = self.where.chip
        yield (
            f"on {self.where.name}: {self.where.chips} chips of {chip.memory >> 30} GiB, {chip.flops / 1e12:.0f}"
            f" TFLOP/s, {chip.hbm / 1e9:.0f} GB/s, {chip.link / 1e9:.0f} GB/s a link"
        )
        if not self.predictions:
            yield "  none of these meshes fits the model's dims:"
            yield from (f"  not {degrees}: {reason}" for degrees, reason in self.misfits.items())
            return
        kinds = " and ".join(sorted(self.dtypes))
        yield f"one forward pass, nothing hidden behind anything; weights in {kinds}"
        yield HEADER
        yield from (p.row() for p in self.predictions[:SHOWN])
        if len(self.predictions) > SHOWN:
            yield f"  and {len(self.predictions) - SHOWN} slower ones (--json has all)"
        if self.fits:
            best = self.predictions[0]
            yield f"  best: {best.degrees}: {_why(best)}"
        else:
            yield (
                f"  no mesh holds the weights: {self.least_chips} chips of {self.where.version} would, or 8-bit weights"
                " (--quantize), or blocks kept in host memory (generate --offload)"
            )
        for degrees, reason in self.misfits.items():
            yield f"  not {degrees}: {reason}"


def _why(best: Prediction) -> str:
    bound = "matrix work" if best.compute >= best.reading else "reading weights"
    links = best.sending / best.seconds
    return f"{bound} {1 - links:.0%} of the step, links {links:.0%}"


def rank(
    family: Family, declared: Any, where: Slice, sizes: TraceSizes, given: Sequence[Degrees] | None = None
) -> Ranking:
    """The given meshes, or all of so many chips, by predicted time.

    Raises:
        InputError: given meshes of another number of chips; as `predict`.
    """
    wrong = [str(d) for d in given or () if d.devices != where.chips]
    if wrong:
        raise InputError(
            f"chips={where.name!r} are {where.chips}, and mesh ({'), ('.join(wrong)}) is of another number"
        )
    verdicts = [judge(declared, degrees) for degrees in given or meshes_of(where.chips, sizes.batch)]
    made = [predict(family, declared, verdict, where, sizes) for verdict in verdicts if verdict.fits]
    _, size = total(declared)
    return Ranking(
        where=where,
        predictions=tuple(sorted(made, key=lambda p: (not p.fits_memory, p.seconds))),
        dtypes=frozenset(param.dtype.name for param in layout.named(declared).values()),
        misfits={v.degrees: v.problems[0] for v in verdicts if not v.fits},
        least_chips=math.floor(size / where.chip.memory) + 1,
    )
