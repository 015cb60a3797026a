"""Whether meshes fit a model, what each device would hold, and what stops those that do not fit."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from shardzoo.cli.terminal import size_text
from shardzoo.zoo import layout
from shardzoo.zoo.mesh import Degrees


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One mesh against one declaration.

    Attributes:
        problems: every misfit; empty when the mesh fits.
        tensors: tensor degrees that would fit instead.
        nearest: meshes of the same number of devices that would fit instead, nearest first.
        device_bytes: bytes of parameters on each device, 0 when the mesh does not fit.
    """

    degrees: Degrees
    problems: tuple[str, ...]
    tensors: tuple[int, ...]
    nearest: tuple[Degrees, ...]
    device_bytes: int

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": str(self.degrees),
            "devices": self.degrees.devices,
            "axes": self.degrees.sizes,
            "fits": self.fits,
            "problems": self.problems,
            "tensor_degrees_that_fit": self.tensors,
            "nearest_meshes": [str(degrees) for degrees in self.nearest],
            "parameter_bytes_per_device": self.device_bytes if self.fits else None,
        }

    def lines(self) -> Iterator[str]:
        """The verdict as text."""
        if self.fits:
            axes = ", ".join(f"{axis}={size}" for axis, size in self.degrees.sizes.items() if size > 1) or "no split"
            yield (
                f"{self.degrees}: fits {_count(self.degrees.devices)} ({axes});"
                f" {size_text(self.device_bytes)} of parameters on each"
            )
            return
        yield f"{self.degrees}: does not fit"
        yield from (f"  {problem}" for problem in self.problems)
        yield f"  tensor degrees that fit: {', '.join(map(str, self.tensors))}"
        if self.nearest:
            listed = " or ".join(f"({degrees})" for degrees in self.nearest)
            yield f"  nearest meshes of {_count(self.degrees.devices)}: {listed}"


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def judge(declared: Any, given: Degrees) -> Verdict:
    """The verdict on `given`, whose tensor degree falls apart into `kv` and `rep` as this model needs."""
    degrees = layout.with_kv(declared, given)
    problems = layout.misfits(declared, degrees)
    if not problems:
        return Verdict(degrees, (), (), (), device_bytes(declared, degrees))
    tensors, nearest = layout.fitting(declared, given)
    return Verdict(degrees, tuple(problems), tuple(tensors), tuple(nearest[:3]), 0)


def device_bytes(declared: Any, degrees: Degrees) -> int:
    """Bytes of parameters that each device holds on a mesh that fits."""
    return sum(
        param.nbytes // math.prod(degrees.sizes[axis] for dim in param.names for axis in param.axes(dim))
        for param in layout.named(declared).values()
    )


def total(declared: Any) -> tuple[int, int]:
    """Number of parameters and their bytes, once."""
    params = layout.named(declared).values()
    return sum(math.prod(p.shape) for p in params), sum(p.nbytes for p in params)
