"""Static schedule of TPU kernels, from the TPU compiler alone: no TPU is needed (`pip install libtpu`).

The compiler writes the instruction bundles of each kernel and what they keep busy. A bundle is issued in one cycle, so
the bundles of a grid step, divided by the query-key pairs it works on, compare kernels. What this leaves out is
dynamic: waits for memory, and a matrix unit that is fed faster than it takes operands (on v5e and v5p a product of
128 x 128 x 128 takes 32 cycles of the four units together, so 2 products a pair cannot take under 3.91 cycles for
1,000 pairs on hardware, whatever the schedule says; the backward pass's 5 products cannot take under 9.77).

Import this module before anything is compiled for a TPU: it tells the compiler where to write.
"""

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DUMP = tempfile.mkdtemp(prefix="tpu_static_")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["LIBTPU_INIT_ARGS"] = " ".join(
    [os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={DUMP}", "--xla_jf_dump_llo_text=true"]
).strip()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_platforms", "cpu")

# A stretch without matrix work that is skipped at times and longer than this is taken to run once a row of the grid
# (it sets up or finishes a block of rows); a shorter one (starting a copy, waiting for it) on every step.
ONCE_PER_ROW = 100


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel. `matrix` holds the bundles of each stretch with matrix work, in program order.

    `every` is the number of bundles of a step outside these, `per_row` of those that run once for a row of the grid.
    """

    name: str
    matrix: tuple[int, ...]
    every: int
    per_row: int
    busy: dict[str, float]

    def step(self, weights: Sequence[float], steps_per_row: int) -> float:
        """Bundles of a mean grid step, in which stretch n with matrix work runs weights[n] times."""
        if len(weights) != len(self.matrix):
            raise ValueError(f"{self.name}: {len(weights)} weights for {len(self.matrix)} stretches {self.matrix}")
        work = sum(w * n for w, n in zip(weights, self.matrix, strict=True))
        return work + self.every + self.per_row / steps_per_row


def compile_for(topology: str, function: Callable, arguments: Sequence[jax.ShapeDtypeStruct]) -> list[Kernel]:
    """Compiles the function for one chip of a topology ("v5e:2x2") and reads the schedules of its matrix kernels."""
    shutil.rmtree(DUMP, ignore_errors=True)
    os.makedirs(DUMP)
    mesh = mesh_of(topology)
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(PartitionSpec() for _ in arguments),
        out_specs=PartitionSpec(),
        check_vma=False,  # JAX's own kernels, measured here too, do not say what their results vary over
    )
    whole = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arguments]
    jax.jit(mapped).lower(*placed).compile()
    found = [_read(path) for path in sorted(glob.glob(f"{DUMP}/*final_hlo-static-per-bundle-utilization.txt"))]
    return [kernel for kernel in found if kernel is not None]


def mesh_of(topology: str) -> Mesh:
    """One chip of a topology; as a context (`jax.set_mesh`), what is traced is traced for it."""
    return Mesh(np.array(topologies.get_topology_desc(topology, platform="tpu").devices[:1]), ("chip",))


def clean() -> None:
    """Removes what the compiler wrote."""
    shutil.rmtree(DUMP, ignore_errors=True)


def _read(path: str) -> Kernel | None:
    name = re.sub(r"-\d+-final_hlo.*", "", os.path.basename(path).split("-", 1)[1])
    listings = [x for x in glob.glob(f"{DUMP}/*-{glob.escape(name)}-*final_bundles.txt") if "schedule" not in x]
    units, capacity, uses = _utilization(path)
    matrix = units.index("MXU")
    if not listings or not uses or not any(row[matrix] for row in uses):
        return None
    bundles = _bundles(listings[0])
    count = min(len(bundles), len(uses))
    grid = [n for n in range(count) if bundles[n][1] >= 1]
    if not grid:
        return None  # a fusion without a loop, no kernel over a grid
    first, last = grid[0], grid[-1]
    stretches, every, per_row, at = [], 0, 0, first
    for start, stop in [*_skipped(bundles, first, last), (last + 1, last + 1)]:
        for low, high, optional in ((at, start, False), (start, stop, True)):
            if any(uses[n][matrix] for n in range(low, high)):
                stretches.append((low, high))
            elif optional and high - low > ONCE_PER_ROW:
                per_row += high - low
            else:
                every += high - low
        at = stop
    deepest = [_innermost(bundles, low, high) for low, high in stretches]
    every += sum(high - low for low, high in stretches) - sum(high - low for low, high in deepest)
    inside = [n for low, high in deepest for n in range(low, high)]
    busy = {u: sum(uses[n][k] for n in inside) / (capacity[k] * len(inside)) for k, u in enumerate(units)}
    return Kernel(name=name, matrix=tuple(high - low for low, high in deepest), every=every, per_row=per_row, busy=busy)


def _innermost(bundles: list[tuple[str, int, str]], low: int, high: int) -> tuple[int, int]:
    """The part of a stretch at its greatest loop depth: the body of its loop, if it has one."""
    depth = max(bundles[n][1] for n in range(low, high))
    inner = [n for n in range(low, high) if bundles[n][1] == depth]
    return inner[0], inner[-1] + 1


def _skipped(bundles: list[tuple[str, int, str]], first: int, last: int) -> list[tuple[int, int]]:
    """The stretches that a forward branch of the grid loop jumps over, outermost ones only."""
    found, at = [], first
    while at <= last:
        _, depth, text = bundles[at]
        at += 1
        if depth != 1 or "sbr.rel" not in text:
            continue
        landing = next((n for n in range(at, last + 1) if bundles[n][0] in ("PF", "CT") and bundles[n][1] == 1), None)
        if landing is not None:
            found.append((at, landing))
            at = landing
    return found


def _bundles(path: str) -> list[tuple[str, int, str]]:
    """Tag, loop depth and text of each bundle."""
    pattern = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:>\s*)*)\{?(.*)")
    with open(path) as lines:
        matches = [m for m in map(pattern.match, lines) if m]
    return [(m.group(1) or "", m.group(2).count(">"), m.group(3)) for m in matches]


def _utilization(path: str) -> tuple[list[str], list[int], list[list[int]]]:
    """Names of the units, how many of each there are, and how many each bundle uses."""
    with open(path) as file:
        lines = file.read().splitlines()
    units = [name.strip() for name in lines[1].split(",")]
    numbers = [[int(x) for x in line.split()] for line in lines[2:] if re.fullmatch(r"[\s\d]+", line) and line.split()]
    rows = [row for row in numbers if len(row) == len(units)]
    return units, rows[0], rows[1:]
