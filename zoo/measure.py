"""What a step takes where it runs, from JAX's profiler: time, work done, collectives and how much of them is exposed.

    found = measure(step, model, opt_state, tokens, carry=2)     # training: two results go on as arguments
    found = measure(forward, model, tokens, flops=costs_of(forward, mesh, model, tokens).flops)
    print("\\n".join(found.lines()))

The step is compiled, run a few times, and run again under `jax.profiler.trace`; the trace (trace.json.gz) is read with
the standard library. Of each device it is known which operations ran when:

* **busy**: some operation runs; **idle**: none does, which is where a pipeline's stages wait for their input, and where
  the host is late.
* **collectives**: one of them runs, waiting for other devices included; **exposed**: one runs and nothing else does.
* **straggler**: the device that computes longest for itself; the others wait for it in their collectives.

In several processes each one calls `measure` with its own share of the arguments, and all get the same figures.
"""

import dataclasses
import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from shardzoo.errors import InputError, fail_if

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_NAMED = re.compile(r"%?([\w.-]+) = (?:\([^=]*?\)|\S+) (" + "|".join(KINDS) + r")(?:-start|-done)?\(")
_ENCLOSING = re.compile(r"%?([\w.-]+) = (?:\([^=]*?\)|\S+) (while|conditional|call)\(")
_MICRO = 1e-6
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Device:
    """Seconds of one step on one device, on average.

    Attributes:
        process, device: where; devices count within their process.
        busy, collectives, exposed: as the module says.
        computing: busy with anything but collectives.
    """

    process: int
    device: int
    busy: float
    collectives: float
    exposed: float
    computing: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes:
        seconds: of each step, from its call to its results, in this process.
        devices: of all processes.
        kinds: kind of collective -> seconds of a step, on average of this process's devices.
        flops: of a step on one device, as they were given.
        peak: operations a second that a device can do.
        memory: bytes at the worst moment, on the device that has most.
        memory_from: "device" where it was measured, "compiler" where the device does not count.
    """

    seconds: tuple[float, ...]
    devices: tuple[Device, ...]
    kinds: Mapping[str, float]
    flops: float | None
    peak: float | None
    memory: int | None
    memory_from: str

    @property
    def step(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs over what the device could do in that time."""
        return None if self.flops is None or not self.peak else self.flops / self.peak / self.step

    def mean(self, name: str) -> float:
        """Of all devices, of a field of `Device`."""
        return statistics.fmean(getattr(device, name) for device in self.devices) if self.devices else 0.0

    @property
    def idle(self) -> float:
        """Share of the step in which a device does nothing."""
        return max(0.0, 1 - self.mean("busy") / statistics.fmean(self.seconds))

    @property
    def straggler(self) -> Device | None:
        """The device that computes longest."""
        return max(self.devices, key=lambda one: one.computing) if len(self.devices) > 1 else None

    @property
    def lateness(self) -> float:
        """Share by which the straggler computes longer than the median device."""
        if self.straggler is None:
            return 0.0
        middle = statistics.median(one.computing for one in self.devices)
        return self.straggler.computing / middle - 1 if middle else 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "step": self.step,
            "utilisation": self.utilisation,
            "collectives": self.mean("collectives"),
            "exposed": self.mean("exposed"),
            "idle": self.idle,
            "lateness": self.lateness,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure."""
        yield "step", f"{1000 * self.step:.2f} ms (of {len(self.seconds)})"
        if self.utilisation is not None:
            yield "model FLOPs utilisation", f"{self.utilisation:.1%} of {(self.peak or 0) / 1e9:.0f} GFLOP/s a device"
        yield "computing", f"{1000 * self.mean('computing'):.2f} ms"
        yield "collectives", f"{1000 * self.mean('collectives'):.2f} ms"
        yield "exposed", f"{1000 * self.mean('exposed'):.2f} ms"
        yield "idle", f"{self.idle:.0%}"
        if self.memory is not None:
            yield "memory", f"{self.memory / 2**20:.1f} MiB a device, by the {self.memory_from}"
        if self.straggler is not None:
            late = self.straggler
            yield "straggler", f"process {late.process}, device {late.device}: {self.lateness:+.0%} of the median"

    def lines(self) -> Iterator[str]:
        """The figures as text."""
        yield from (f"{name:24} {value}" for name, value in self.rows())


def measure(
    step: Callable,
    *arguments: Any,
    steps: int = 5,
    warm: int = 2,
    carry: int = 0,
    flops: float | None = None,
    peak: float | None = None,
    folder: str | Path | None = None,
) -> Measured:
    """Runs `step(*arguments)` and says what it takes.

    Args:
        step: jitted, or to be jitted.
        steps, warm: how often it runs under the profiler, and before.
        carry: so many of its first results take the place of its first arguments in the next call; a step that donates
            needs it.
        flops: of one step on one device (`zoo.costs`), for the utilisation.
        peak: operations a second of a device; None is what a product of large matrices reaches on it.
        folder: where the trace is kept for other tools; None is nowhere.

    Raises:
        InputError: fewer than one step; the profiler saw none of the step's operations.
    """
    fail_if([f"{name}={n} is too few" for name, n in (("steps", steps), ("warm", warm)) if n < 1], "measure")
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    compiled = jitted.lower(*arguments).compile()
    for _ in range(warm):
        arguments = _run(compiled, arguments, carry)
    seconds = []
    with tempfile.TemporaryDirectory() as kept:
        place = Path(kept if folder is None else folder)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(place, profiler_options=options):
            for _ in range(steps):
                begin = time.perf_counter()
                arguments = _run(compiled, arguments, carry)
                seconds.append(time.perf_counter() - begin)
        events = read_trace(place, compiled.as_text())
    own, kinds = _own_devices(events, steps), _kinds(events, steps)
    if not own:
        raise InputError(f"measure: the profiler saw no operation of {_module(compiled.as_text())!r}: run more steps")
    memory, source = _memory(compiled)
    if flops is not None and peak is None:
        peak = reached(jax.local_devices()[0])
    return Measured(
        seconds=tuple(seconds), devices=_all_devices(own), kinds=kinds, flops=flops, peak=peak,
        memory=memory, memory_from=source,
    )  # fmt: skip


def _run(compiled: Any, arguments: tuple, carry: int) -> tuple:
    out = jax.block_until_ready(compiled(*arguments))
    return (*out[:carry], *arguments[carry:]) if carry else arguments


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation on a device: when, in seconds, and the kind of collective that it is, if it is one."""

    device: int
    name: str
    begin: float
    end: float
    kind: str | None


def read_trace(folder: str | Path, program: str) -> list[Event]:
    """The operations of a compiled program in this process's newest trace in the folder.

    `program` is its text: what an operation is called does not tell what it is. Operations that only hold others
    (loops) are left out.

    Raises:
        InputError: there is no trace.
    """
    found = sorted(Path(folder).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f"{folder}: holds no trace.json.gz: give the folder that jax.profiler.trace wrote to")
    with gzip.open(found[-1], "rt", encoding="utf-8") as file:
        raw = json.load(file)["traceEvents"]
    kinds = {name: kind for name, kind in _NAMED.findall(program)}
    enclosing = {name for name, _ in _ENCLOSING.findall(program)}
    tracks = _tracks(raw)
    events = []
    for one in raw:
        arguments = one.get("args", {})
        name = arguments.get("hlo_op")
        if one.get("ph") != "X" or name is None or one["name"].startswith("end: ") or name in enclosing:
            continue
        if arguments.get("hlo_module", "").partition("(")[0] != _module(program):
            continue
        device = int(arguments.get("device_ordinal", tracks.get(one["pid"], 0)))
        begin = one["ts"] * _MICRO
        events.append(Event(device, name, begin, begin + one.get("dur", 0) * _MICRO, kinds.get(name)))
    return events


def _tracks(raw: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Track -> the device that it is of: /device:TPU:3."""
    named = {one["pid"]: one["args"]["name"] for one in raw if one.get("name") == "process_name"}
    found = {pid: re.search(r"/device:\w+:(\d+)", name) for pid, name in named.items()}
    return {pid: int(match[1]) for pid, match in found.items() if match}


def _module(program: str) -> str:
    match = re.match(r"HloModule ([\w.-]+)", program)
    return match[1] if match else ""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not meet, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def length(spans: Sequence[Span]) -> float:
    """How long spans that do not meet are together."""
    return sum((end - begin for begin, end in spans), 0.0)


def _own_devices(events: Sequence[Event], steps: int) -> list[Device]:
    found = []
    for place, device in enumerate(sorted({event.device for event in events})):
        mine = [event for event in events if event.device == device]
        busy = length(union((e.begin, e.end) for e in mine))
        together = length(union((e.begin, e.end) for e in mine if e.kind))
        computing = length(union((e.begin, e.end) for e in mine if not e.kind))
        one = Device(
            process=jax.process_index(),
            device=place,
            busy=busy / steps,
            collectives=together / steps,
            exposed=(busy - computing) / steps,
            computing=computing / steps,
        )
        found.append(one)
    return found


def _kinds(events: Sequence[Event], steps: int) -> dict[str, float]:
    count = max(1, len({event.device for event in events})) * steps
    sums: dict[str, float] = {}
    for event in events:
        if event.kind:
            sums[event.kind] = sums.get(event.kind, 0.0) + (event.end - event.begin) / count
    return sums


def _all_devices(own: Sequence[Device]) -> tuple[Device, ...]:
    """Those of all processes, each of which has as many."""
    if jax.process_count() == 1:
        return tuple(own)
    gathered = process_allgather(np.asarray([dataclasses.astuple(one) for one in own], np.float32))
    rows = np.asarray(gathered).reshape(-1, len(dataclasses.fields(Device)))
    return tuple(Device(int(row[0]), int(row[1]), *(float(x) for x in row[2:])) for row in rows)


def _memory(compiled: Any) -> tuple[int | None, str]:
    """Bytes at the worst moment: what the devices counted, else what the compiler planned."""
    counted = [stats.get("peak_bytes_in_use", 0) for d in jax.local_devices() if (stats := d.memory_stats())]
    if counted:
        return max(counted), "device"
    planned = compiled.memory_analysis()
    if planned is None:
        return None, "compiler"
    sizes = (planned.argument_size_in_bytes, planned.output_size_in_bytes, planned.temp_size_in_bytes)
    return sum(sizes) - planned.alias_size_in_bytes, "compiler"


def reached(device: jax.Device, size: int = 1024, times: int = 4) -> float:
    """Operations a second of a product of matrices on a device: 16-bit floats, on a CPU 32-bit ones."""
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    size = size if device.platform == "cpu" else 8 * size
    x = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(product(x))
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
