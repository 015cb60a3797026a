"""What would fit where nothing does: more chips, 8-bit weights, blocks in host memory, smaller inputs.

Each is tried by the same arithmetic as the meshes that did not fit, and only what then fits is named.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from shardzoo.cli.chips import Slice
from shardzoo.cli.memory import MOMENTS, part_bytes, weight_bytes
from shardzoo.cli.prediction import Prediction, Remedy, meshes_of, predict
from shardzoo.cli.verdicts import judge
from shardzoo.zoo import layout, quantize
from shardzoo.zoo.families import Family, TraceSizes
from shardzoo.zoo.mesh import Degrees

MORE = (2, 4, 8, 16)  # times the chips
SMALLER = (2, 4, 8)  # parts of a length
MESHES = 1  # that are tried of a larger slice: those with the least weights on a device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """A family's pass that fits no mesh of a slice, and how it was predicted."""

    family: Family
    declared: Any
    where: Slice
    sizes: TraceSizes
    train: bool
    remat: str | bool = False
    at_rest: str | None = None

    def lying(self, degrees: Degrees) -> Any:
        """The declaration as it lies on a mesh."""
        return self.declared if self.at_rest is None else layout.split_at_rest(self.declared, self.at_rest, degrees)

    def least(self, degrees: Degrees) -> int:
        """Bytes of a chip without the pass itself: weights and, when training, their gradients and moments."""
        declared = self.lying(degrees)
        weights = sum(part_bytes(declared, degrees, weight_bytes).values())
        moments = sum(part_bytes(declared, degrees, lambda _, shape: MOMENTS * math.prod(shape)).values())
        return 2 * weights + moments if self.train else weights

    def on(self, degrees: Degrees, **change: Any) -> Prediction | None:
        """The prediction on a mesh, some of this changed; None where dims do not allow it, or weights have no room."""
        one = dataclasses.replace(self, **change)
        verdict = judge(one.declared, degrees)
        if not verdict.fits or one.least(verdict.degrees) > one.where.chip.device.usable:
            return None
        declared = one.lying(verdict.degrees)
        verdict = judge(declared, degrees)
        return predict(one.family, declared, verdict, one.where, one.sizes, train=one.train, remat=one.remat)


def remedies(attempt: Attempt, nearest: Degrees | None) -> tuple[Remedy, ...]:
    """The smallest change of each kind that fits; `nearest` is the mesh of the slice that takes the least memory."""
    found = list(_more_chips(attempt))
    if nearest is not None:
        found += [*_eight_bits(attempt, nearest), *_offload(attempt, nearest), *_smaller(attempt, nearest)]
    return tuple(found)


def _remedy(what: str, prediction: Prediction | None) -> Iterator[Remedy]:
    if prediction is not None and prediction.fits_memory:
        yield Remedy(what=what, degrees=prediction.degrees, memory=prediction.memory.total)


def _more_chips(attempt: Attempt) -> Iterator[Remedy]:
    where = attempt.where
    for times in MORE:
        chips = where.chips * times
        if chips > where.chip.most:
            return
        larger = dataclasses.replace(where, name=f"{where.version}-{chips * where.chip.cores}", chips=chips)
        for degrees in _lightest(attempt.declared, larger.devices, attempt.sizes.batch):
            found = list(_remedy(f"{larger.name}, {chips} chips", attempt.on(degrees, where=larger)))
            if found:
                yield from found
                return


def _lightest(declared: Any, devices: int, batch: int) -> list[Degrees]:
    """The meshes of so many devices that put the fewest weights on each."""
    fitting = [verdict for verdict in (judge(declared, one) for one in meshes_of(devices, batch)) if verdict.fits]
    fitting.sort(key=lambda verdict: (verdict.device_bytes, verdict.degrees.data))
    return [verdict.degrees for verdict in fitting[:MESHES]]


def _eight_bits(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    declared = attempt.declared
    if not attempt.train and quantize.kind_of(declared) is None and quantize.quantizable(declared, "int8"):
        smaller = quantize.declare(declared, "int8")
        yield from _remedy("int8 weights (--quantize int8)", attempt.on(nearest, declared=smaller))


def _offload(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    if not attempt.train:
        moved = layout.keep_on_host(attempt.declared)
        what = "blocks kept in host memory (generate --offload)"
        yield from _remedy(what, attempt.on(nearest, declared=moved))


def _smaller(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    """A shorter clip or text, or a smaller picture: the first part of each that fits."""
    sizes = attempt.sizes
    for name in ("batch", "frames", "tokens"):
        for part in SMALLER:
            size = getattr(sizes, name) // part
            if size < 1 or (name == "batch" and size % nearest.data):
                break
            found = list(_fitting(attempt, nearest, f"{name}={size}", {name: size}))
            if found:
                yield from found
                break
    for part in SMALLER[:2]:
        half = {name: getattr(sizes, name) // part for name in ("height", "width")}
        found = list(_fitting(attempt, nearest, f"height={half['height']}, width={half['width']}", half))
        if found:
            yield from found
            break


def _fitting(attempt: Attempt, nearest: Degrees, what: str, change: dict[str, int]) -> Iterator[Remedy]:
    smaller = dataclasses.replace(attempt.sizes, **change)
    yield from _remedy(what, attempt.on(nearest, sizes=smaller))
