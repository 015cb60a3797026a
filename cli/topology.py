"""Compiling a model's forward pass for a TPU slice that is not there: what each of its devices would need.

The compiler comes with `pip install libtpu`; no TPU is touched. Its figures are those of XLA for the whole program.
"""

import collections
import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardzoo.cli.terminal import size_text
from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.families import Family, TraceSizes, family_names, find_family
from shardzoo.zoo.mesh import Degrees, make_mesh

# What the library asks its surroundings for, where it is not on a TPU machine; the type is any that it knows.
SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
# Of the compiler: "quick" leaves out most optimisation, the placing of buffers on chip among it, so that more of them
# stand in the chip's memory; it takes a third to a tenth of the time. At full effort each convolution is tuned for
# about 3 s, so that autoencoders (31 to 70 of them) take minutes; everything else takes half a minute at most.
MANY_CONVOLUTIONS = 8
EFFORTS: Mapping[str, dict[str, Any]] = {"full": {}, "quick": {"exec_time_optimization_effort": -1.0}}
PARTS_OF_A_HOST = ("1x1", "1x2", "2x1", "1x1x1", "1x1x2", "1x2x1", "2x1x1")  # shapes of fewer chips than a host has
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
        device: kind of device.
        effort: of the compiler, one of `EFFORTS`.
        convolutions: in the program; of many the effort is "quick" unless it was chosen.
        seconds: time to compile.
        argument_bytes, output_bytes, temporary_bytes: set aside in each device's memory; the parameters are arguments.
        peak_bytes: alive at the worst moment, wherever it lies: on chip too, copies of weights among it.
        collectives: operation -> how many stand in the program (those in the body of a scan once).
    """

    device: str
    effort: str
    convolutions: int
    seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int
    collectives: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All that is set aside in the device's memory."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def off(self, bytes: int) -> float:
        """How far a count of values alive at the worst moment is off what the compiler says.

        The compiler counts the same in `peak_bytes`, and refuses a program by it: of 18.5 GiB set aside and 14.1 at the
        peak it compiles one for chips of 15.75, of 16.4 that are needed at once it does not. It hardly changes with the
        effort, where `total_bytes` has the holes between buffers too (of autoencoders up to twice what is alive), and
        not what is kept on chip. Where the peak is above the total, the difference is on chip, copies of weights among
        it that are there twice: anything between the two is right.
        """
        low, high = min(self.total_bytes, self.peak_bytes), self.peak_bytes
        return bytes / low - 1 if bytes < low else max(0.0, bytes / high - 1)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    def lines(self) -> Iterator[str]:
        """The figures as text."""
        parts = {
            "arguments": self.argument_bytes,
            "results": self.output_bytes,
            "temporaries": self.temporary_bytes,
        }
        listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
        found = ", ".join(f"{count} {name}" for name, count in sorted(self.collectives.items())) or "none"
        yield f"  on each {self.device}: {listed} (compiled in {self.seconds:.0f} s, {self.effort} effort)"
        if self.effort == "quick" and self.convolutions > MANY_CONVOLUTIONS:
            yield f"  --full compiles at full effort: with {self.convolutions} convolutions in minutes"
        yield f"  collectives in the program: {found}"


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a slice by its name, for example `v5e:2x4`.

    Raises:
        InputError: libtpu is not installed, or it has no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("audit --topology compiles with libtpu: pip install libtpu")
    from jax.experimental import topologies

    for variable, value in SURROUNDINGS.items():
        os.environ.setdefault(variable, value)
    version, _, shape = name.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if version == "v4" else {}  # one device a chip, as run
    if shape in PARTS_OF_A_HOST:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"topology={name!r} is not one of libtpu's ({reason}): use for example v5e:2x4") from error


def compile_forward(
    family: Family,
    declared: Any,
    degrees: Degrees,
    devices: list[jax.Device],
    sizes: TraceSizes,
    dtype: np.dtype | None,
    effort: str | None = None,
) -> Compiled:
    """Compiles the family's forward pass on a mesh of `degrees` over `devices`; `dtype` is that of the weights.

    `effort` is one of `EFFORTS`; None is the full one, unless the program has many convolutions.

    Raises:
        InputError: the family has no forward pass to compile; the program does not fit the devices' memory.
    """
    if family.trace is None:
        able = ", ".join(name for name in family_names() if find_family(name).trace)
        raise InputError(f"family={family.name!r} cannot be compiled ahead of time: {able} can")
    declared = layout.astype(declared, dtype)
    mesh = make_mesh(
        data=degrees.data,
        pipe=degrees.pipe,
        context=degrees.context,
        tensor=degrees.tensor,
        kv_heads=degrees.kv_heads,
        devices=devices,
    )
    function, arguments = family.trace(declared, mesh, sizes)
    begin = time.monotonic()
    lowered = jax.jit(function).lower(layout.abstract(declared, mesh), *arguments)
    convolutions = lowered.as_text().count("stablehlo.convolution")
    effort = effort or ("quick" if convolutions > MANY_CONVOLUTIONS else "full")
    try:
        compiled = lowered.compile(compiler_options=dict(EFFORTS[effort]))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0][:300]
        raise InputError(f"mesh ({degrees}): does not fit the devices' memory ({reason}): use more devices") from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None  # they are there for TPUs
    return Compiled(
        device=devices[0].device_kind,
        effort=effort,
        convolutions=convolutions,
        seconds=time.monotonic() - begin,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        collectives=dict(collections.Counter(COLLECTIVE.findall(text))),
    )
