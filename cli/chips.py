"""TPU chips and slices: what a chip has, by Google's published figures, and what a slice's name means.

Source: the pages "System architecture" of each version in Google Cloud's TPU documentation (read in November 2026).
Bandwidths between chips are published as a sum over all links of a chip; one link has that over their number.
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
        hbm: bytes a second between HBM and the chip.
        flops: matrix work a second with 16-bit floats.
        link: bytes a second that one link carries in one direction.
        most: chips of the largest slice.
        cores: tensor cores, where slices are named by their number of cores and not of chips.
    """

    kind: str
    memory: int
    hbm: float
    flops: float
    link: float
    most: int
    cores: int = 1


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(kind="TPU v4", memory=32 * GIB, hbm=1228 * GB, flops=275e12, link=2400 / 8 / 6 * GB, most=4096, cores=2),
    "v5e": Chip(kind="TPU v5 lite", memory=16 * GIB, hbm=819 * GB, flops=197e12, link=1600 / 8 / 4 * GB, most=256),
    "v5p": Chip(
        kind="TPU v5", memory=95 * GIB, hbm=2765 * GB, flops=459e12, link=4800 / 8 / 6 * GB, most=6144, cores=2
    ),
    "v6e": Chip(kind="TPU v6 lite", memory=32 * GIB, hbm=1638 * GB, flops=918e12, link=800 / 2 / 4 * GB, most=256),
}
_NAME = re.compile(r"(v[0-9]+[a-z]?)-([0-9]{1,6})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """So many chips of one kind; `name` is as given."""

    name: str
    version: str
    chip: Chip
    chips: int


def parse(name: str) -> Slice:
    """What a slice's name means: of "v5e-8" 8 chips; of "v5p-8" 4, as names of v4 and v5p count cores.

    Raises:
        InputError: no such chip, not a whole number of chips, or more than slices have.
    """
    found = _NAME.fullmatch(name)
    version, count = (found[1], int(found[2])) if found else (name, 0)
    chip = CHIPS.get(version)
    if chip is None or count < 1:
        raise InputError(f"chips={name!r} is not a version and a count: use for example v5e-8 ({', '.join(CHIPS)})")
    if count % chip.cores:
        raise InputError(
            f"chips={name!r}: names of {version} count cores, {chip.cores} to a chip: use {version}-{count + 1}"
        )
    if count > chip.most * chip.cores:
        raise InputError(f"chips={name!r}: slices of {version} have at most {chip.most} chips: give fewer")
    return Slice(name=name, version=version, chip=chip, chips=count // chip.cores)
