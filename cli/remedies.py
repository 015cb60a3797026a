"""What would fit where nothing does: more chips, blocks computed again, weights split at rest, in 8 bits or in host
memory, smaller inputs.

Each is tried by the same arithmetic as the meshes that did not fit, and only what then fits is named.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from shardzoo.cli.chips import Slice
from shardzoo.cli.memory import MOMENTS, part_bytes, weight_bytes
from shardzoo.cli.options import AT_REST
from shardzoo.cli.prediction import Prediction, Remedy, meshes_of, predict, sizes_of
from shardzoo.cli.verdicts import Verdict, judge
from shardzoo.zoo import layout, quantize
from shardzoo.zoo.families import Family, TraceSizes
from shardzoo.zoo.mesh import Degrees

MORE = (2, 4, 8, 16)  # times the chips
SMALLER = (2, 4, 8)  # parts of a length
AGAIN = "blocks computed again (--remat all)"
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
        found += _kept_less(attempt, nearest) if attempt.train else _smaller_weights(attempt, nearest)
        found += _smaller(attempt, nearest)
    return tuple(found)


def _remedy(what: str, prediction: Prediction | None) -> Iterator[Remedy]:
    if prediction is not None and prediction.fits_memory:
        yield Remedy(what=what, degrees=prediction.degrees, memory=prediction.memory.total)


def _more_chips(attempt: Attempt) -> Iterator[Remedy]:
    """The fewest more chips; if none of those tried is enough by itself, with as much split at rest as there is."""
    larger = list(_larger(attempt.where))
    for where in larger:
        for degrees in _lightest(attempt.declared, where.devices, attempt.sizes.batch):
            found = list(_remedy(_chips(where), attempt.on(degrees, where=where)))
            if found:
                yield from found
                return
    for where in larger:
        found = list(_split_at_rest(dataclasses.replace(attempt, where=where), f"{_chips(where)}, "))
        if found:
            yield min(found, key=lambda remedy: remedy.memory)
            return


def _larger(where: Slice) -> Iterator[Slice]:
    for chips in (where.chips * times for times in MORE):
        if chips <= where.chip.most:
            yield dataclasses.replace(where, name=f"{where.version}-{chips * where.chip.cores}", chips=chips)


def _chips(where: Slice) -> str:
    return f"{where.name}, {where.chips} chips"


def _lightest(declared: Any, devices: int, batch: int) -> list[Degrees]:
    """The meshes of so many devices that put the fewest weights on each."""
    fitting = _allowed(declared, devices, batch)
    fitting.sort(key=lambda verdict: (verdict.device_bytes, verdict.degrees.data))
    return [verdict.degrees for verdict in fitting[:MESHES]]


def _allowed(declared: Any, devices: int, batch: int) -> list[Verdict]:
    """The meshes of so many devices that the model's dims allow."""
    return [verdict for verdict in (judge(declared, one) for one in meshes_of(devices, batch)) if verdict.fits]


def _kept_less(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    """Of training: activations computed again; weights with their gradients and moments split at rest."""
    if not attempt.remat:
        yield from _remedy(AGAIN, attempt.on(nearest, remat=True))
    yield from _split_at_rest(attempt)


def _smaller_weights(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    """Of a pass alone: weights split at rest, in 8 bits, or in host memory."""
    declared = attempt.declared
    yield from _split_at_rest(attempt)
    if quantize.kind_of(declared) is None and quantize.quantizable(declared, "int8"):
        smaller = quantize.declare(declared, "int8")
        yield from _remedy("int8 weights (--quantize int8)", attempt.on(nearest, declared=smaller))
    moved = layout.keep_on_host(declared)
    yield from _remedy("blocks kept in host memory (generate --offload)", attempt.on(nearest, declared=moved))


def _split_at_rest(attempt: Attempt, before: str = "") -> Iterator[Remedy]:
    """Over each axis on the mesh with most of it; when training, where that is not enough, with blocks run again."""
    for degrees, axis in _for_splits(attempt):
        what = f"{before}weights split at rest (--at-rest {axis})"
        found = list(_remedy(what, attempt.on(degrees, at_rest=axis)))
        if not found and attempt.train and not attempt.remat:
            found = list(_remedy(f"{what}, {AGAIN}", attempt.on(degrees, at_rest=axis, remat=True)))
        yield from found


def _for_splits(attempt: Attempt) -> Iterator[tuple[Degrees, str]]:
    """For each axis that weights may be split over at rest, the mesh of the slice with most of it."""
    if attempt.at_rest is None:
        allowed = _allowed(attempt.declared, attempt.where.devices, attempt.sizes.batch)
        for axis in AT_REST:
            most = max((verdict.degrees for verdict in allowed), key=lambda d: d.sizes[axis], default=None)
            if most is not None and most.sizes[axis] > 1:
                yield most, axis


def _smaller(attempt: Attempt, nearest: Degrees) -> Iterator[Remedy]:
    """A shorter clip or text, or a smaller picture: the first part of each that fits."""
    sizes, taken = attempt.sizes, ("batch", *sizes_of(attempt.family, attempt.declared))
    for name in ("batch", "frames", "tokens"):
        if name not in taken:
            continue
        for part in SMALLER:
            size = _part(name, getattr(sizes, name), part)
            if size in (0, getattr(sizes, name)) or (name == "batch" and size % nearest.data):
                break
            found = list(_fitting(attempt, nearest, f"{name}={size}", {name: size}))
            if found:
                yield from found
                break
    for part in SMALLER[:2] if "height" in taken else ():
        half = {name: getattr(sizes, name) // part for name in ("height", "width")}
        found = list(_fitting(attempt, nearest, f"height={half['height']}, width={half['width']}", half))
        if found:
            yield from found
            break


def _part(name: str, size: int, part: int) -> int:
    """So large a part of a size; of a video's frames one and a multiple of 4, as its autoencoder takes them."""
    return 1 + (size - 1) // (4 * part) * 4 if name == "frames" else size // part


def _fitting(attempt: Attempt, nearest: Degrees, what: str, change: dict[str, int]) -> Iterator[Remedy]:
    smaller = dataclasses.replace(attempt.sizes, **change)
    yield from _remedy(what, attempt.on(nearest, sizes=smaller))
