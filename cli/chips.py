"""TPU chips and slices: what a chip has, by Google's published figures, and what a slice's name means.

Source: the pages "System architecture" of each version in Google Cloud's TPU documentation (read in November 2026), for
v7x docs.cloud.google.com/tpu/docs/tpu7x. Bandwidths between chips are published as a sum over all links of a chip; one
link has that over their number. What of a chip's memory a program may have is what the compiler says when one needs
more (libtpu 0.0.42.1, "available HBM").

A chip of v7x is two devices to JAX, each with half of everything; of the others a chip is one device.
"""

import dataclasses
import re
from collections.abc import Mapping

from shardzoo.errors import InputError

GB, GIB = 1e9, 2**30  # what the pages call GB of memory are GiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip.

    Attributes:
        kind: the device kind that JAX names.
        memory: bytes of HBM.
        usable: those of them that a program may have.
        hbm: bytes a second between HBM and the chip.
        flops: matrix work a second with 16-bit floats.
        link: bytes a second that one link carries in one direction.
        most: chips of the largest slice.
        cores: tensor cores, where slices are named by their number of cores and not of chips.
        devices: of JAX, which a mesh is made of.
        topology: dims of the torus that chips of this kind are joined to.
    """

    kind: str
    memory: int
    usable: int
    hbm: float
    flops: float
    link: float
    most: int
    cores: int = 1
    devices: int = 1
    topology: int = 2

    @property
    def device(self) -> "Chip":
        """What one device of the chip has; its links are shared."""
        n = self.devices
        return dataclasses.replace(
            self,
            memory=self.memory // n,
            usable=self.usable // n,
            hbm=self.hbm / n,
            flops=self.flops / n,
            link=self.link / n,
            devices=1,
        )


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(
        kind="TPU v4", memory=32 * GIB, usable=int(30.5 * GIB), hbm=1228 * GB, flops=275e12, link=2400 / 8 / 6 * GB,
        most=4096, cores=2, topology=3,
    ),
    "v5e": Chip(
        kind="TPU v5 lite", memory=16 * GIB, usable=int(15.75 * GIB), hbm=819 * GB, flops=197e12,
        link=1600 / 8 / 4 * GB, most=256,
    ),
    "v5p": Chip(
        kind="TPU v5", memory=95 * GIB, usable=95 * GIB, hbm=2765 * GB, flops=459e12, link=4800 / 8 / 6 * GB, most=6144,
        cores=2, topology=3,
    ),
    "v6e": Chip(
        kind="TPU v6 lite", memory=32 * GIB, usable=int(31.25 * GIB), hbm=1638 * GB, flops=918e12,
        link=800 / 2 / 4 * GB, most=256,
    ),
    "v7x": Chip(
        kind="TPU7x", memory=192 * GIB, usable=int(189.5 * GIB), hbm=7380 * GB, flops=2307e12, link=1200 / 2 / 6 * GB,
        most=9216, cores=2, devices=2, topology=3,
    ),
}  # fmt: skip
_NAME = re.compile(r"([A-Za-z][A-Za-z0-9-]*)-([0-9]{1,6})")
# Shapes of slices of so many chips, as libtpu names them.
_FLAT = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBIC = {
    1: "1x1x1", 2: "1x1x2", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
    512: "8x8x8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """So many chips of one kind; `name` is as given. A mesh of it has `devices` devices."""

    name: str
    version: str
    chip: Chip
    chips: int

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def topology(self) -> str:
        """Its shape as libtpu names it, to compile for.

        Raises:
            InputError: no slice of this size has a usual shape.
        """
        shapes = _FLAT if self.chip.topology == 2 else _CUBIC
        if self.chips not in shapes:
            known = ", ".join(map(str, shapes))
            raise InputError(f"chips={self.name!r}: to compile for {self.chips} chips there is no shape: use {known}")
        return f"{'tpu7x' if self.version == 'v7x' else self.version}:{shapes[self.chips]}"


def parse(name: str) -> Slice:
    """What a slice's name means: of "v5e-8" 8 chips; of "v5p-8" 4, as names of v4, v5p and v7x count cores.

    Raises:
        InputError: no such chip, not a whole number of chips, or more than slices have.
    """
    found = _NAME.fullmatch(name)
    version, count = (found[1], int(found[2])) if found else (name, 0)
    version = "v7x" if version == "tpu7x" else version
    chip = CHIPS.get(version)
    if chip is None and count:
        raise InputError(f"chips={name!r}: nothing is known of {version}: use one of {', '.join(CHIPS)}, as in v5e-8")
    if chip is None or count < 1:
        raise InputError(f"chips={name!r} is not a version and a count: use for example v5e-8 ({', '.join(CHIPS)})")
    if count % chip.cores:
        raise InputError(
            f"chips={name!r}: names of {version} count cores, {chip.cores} to a chip: use {version}-{count + 1}"
        )
    if count > chip.most * chip.cores:
        raise InputError(f"chips={name!r}: slices of {version} have at most {chip.most} chips: give fewer")
    return Slice(name=name, version=version, chip=chip, chips=count // chip.cores)
