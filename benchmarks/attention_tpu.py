"""Scheduled bundles for 1,000 query-key pairs of the TPU attention kernels and of those that JAX ships, in one run.

    python benchmarks/attention_tpu.py [--chips v5e v6e] [--only TEXT]

Needs libtpu (`pip install libtpu`), no TPU: see `tpu_static`. bfloat16, 10 heads, 32,768 queries and keys; pairs that a
causal mask hides are not counted, so that a causal row shows what its wasted work costs. JAX's kernels are
compiled at several block sizes, and the best one is printed. The last columns are bytes a grid step moves, against
those that the chip's memory delivers while the step's bundles issue: below 1, memory keeps up (double-buffered).
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tpu_static
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from shardzoo.kernels.flash_attention import tpu_backward, tpu_blocks, tpu_forward
from shardzoo.kernels.flash_attention.options import Extras, Options, sizes

HEADS, LENGTH = 10, 32768

# Topology to compile for, cycles a second and memory bytes a second (of one core where a chip has two).
CHIPS = {
    "v4": ("v4:2x2x1", 1.05e9, 1.2e12 / 2),
    "v5e": ("v5e:2x2", 1.5e9, 0.82e12),
    "v5p": ("v5p:2x2x1", 1.75e9, 2.77e12 / 2),
    "v6e": ("v6e:2x2", 1.75e9, 1.64e12),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of the table."""

    name: str
    head_dim: int = 128
    length: int = LENGTH
    causal: bool = False
    backward: bool = False


SETTINGS = [
    Setting(name="forward"),
    Setting(name="forward, 32,760", length=32760),
    Setting(name="forward, head_dim 64", head_dim=64),
    Setting(name="forward, head_dim 256", head_dim=256),
    Setting(name="forward, causal", causal=True),
    Setting(name="backward", backward=True),
    Setting(name="backward, 32,760", length=32760, backward=True),
    Setting(name="backward, head_dim 64", head_dim=64, backward=True),
    Setting(name="backward, head_dim 256", head_dim=256, backward=True),
    Setting(name="backward, causal", causal=True, backward=True),
]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A function to compile and how often its stretches run.

    `weights` gives, for each of its kernels, the times that a mean step runs each stretch with matrix work. `steps` is
    how many steps of `pairs` pairs the grid runs for one head, `row` how many of them make up a row of the grid.
    `moved` is what a step moves between HBM and VMEM.
    """

    function: Callable
    arguments: list[jax.ShapeDtypeStruct]
    weights: list[list[float]]
    pairs: int
    steps: float
    row: int
    moved: int
    blocks: str


def visible(setting: Setting) -> float:
    """Pairs of one head that attend to each other."""
    return setting.length * (setting.length + 1) / 2 if setting.causal else setting.length**2


def tensors(setting: Setting, heads_first: bool) -> jax.ShapeDtypeStruct:
    shape = (1, setting.length, HEADS, setting.head_dim)
    return jax.ShapeDtypeStruct(tuple(shape[n] for n in (0, 2, 1, 3)) if heads_first else shape, jnp.bfloat16)


def ours(chip: str, setting: Setting) -> Work:
    """This package's kernel at its preset block sizes for the chip."""
    step = "backward" if setting.backward else "forward"
    options = Options(scale=setting.head_dim**-0.5, after=0 if setting.causal else None)
    x = tensors(setting, heads_first=False)
    with jax.set_mesh(tpu_static.mesh_of(CHIPS[chip][0])):
        call = tpu_blocks.call_of(step, sizes(x, x), 2, Extras(), options)
    line = jax.ShapeDtypeStruct((1, HEADS, 1, call.q_blocks * call.blocks.q), jnp.float32)
    if setting.backward:
        arguments = [x] * 4 + [line] * 2
        function = lambda q, k, v, *rest: tpu_backward.run(call, q, k, v, Extras(), *rest)  # noqa: E731
    else:
        arguments = [x] * 3
        function = lambda q, k, v: tpu_forward.run(call, q, k, v, Extras())  # noqa: E731
    weights, steps = shares(call, setting)
    rows = call.blocks.q * setting.head_dim
    keys = call.blocks.kv * setting.head_dim
    # Backward: q and d_out come in bfloat16, dq goes out and in in float32.
    moved = rows * (2 + 2 + 4 + 4) if setting.backward else keys * (2 + 2)
    row = call.q_blocks if setting.backward else call.kv_blocks
    return Work(
        function=function,
        arguments=arguments,
        weights=[weights],
        pairs=call.blocks.q * call.blocks.kv,
        steps=steps,
        row=row,
        moved=moved,
        blocks=f"{call.blocks.q}/{call.blocks.kv}",
    )


def shares(call: tpu_blocks.Call, setting: Setting) -> tuple[list[float], float]:
    """How often a mean step with work runs unmasked and masked code, and the number of such steps."""
    blocks, edges = call.blocks, tpu_blocks.Edges(call, None, 0)
    whole = cut = masked = 0
    for i in range(call.q_blocks):
        for j in range(call.kv_blocks):
            row, key = i * blocks.q, j * blocks.kv
            beyond = setting.backward and call.q_tail and i == call.q_blocks - 1
            if not edges.some_visible(row, blocks.q, key, blocks.kv):
                continue
            if edges.all_visible(row, blocks.q, key, blocks.kv) and not beyond:
                whole += 1
            else:
                cut += 1
                masked += 1 if setting.backward else _parts(call, edges, row, key)
    total = whole + cut
    rounds = 1 if setting.backward else blocks.q // blocks.tile_q // tpu_forward.whole_part(call)[0]
    runs = whole * rounds / total
    return ([runs, masked / total] if cut else [runs]), total


def _parts(call: tpu_blocks.Call, edges: tpu_blocks.Edges, row: int, key: int) -> int:
    """How often the forward kernel's masked code runs in one step."""
    tiles, chunks, _ = tpu_forward.edge_part(call)
    rows, keys = tiles * call.blocks.tile_q, chunks * call.blocks.tile_kv
    if not call.moving_edges:
        return call.blocks.q // rows
    at = [(row + a, key + b) for a in range(0, call.blocks.q, rows) for b in range(0, call.blocks.kv, keys)]
    return sum(edges.some_visible(r, rows, k, keys) for r, k in at)


def jax_splash(setting: Setting, q: int, kv: int, compute: int) -> Work:
    """JAX's splash kernel; backward fused, with a dq buffer per block of keys."""
    n = setting.length
    mask = masks.CausalMask((n, n)) if setting.causal else masks.FullMask((n, n))
    wide = {"block_q": q, "block_kv": kv, "block_kv_compute": compute}
    if setting.backward:
        wide |= {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True}
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * HEADS), block_sizes=splash.BlockSizes(**wide), head_shards=1, q_seq_shards=1
    )
    function = jax.vmap(kernel)
    steps = sum(min(n // kv, -(-(i + 1) * q // kv)) for i in range(n // q)) if setting.causal else (n // q) * (n // kv)
    return _peer(setting, function, q * kv, steps, n // kv, f"{q}/{kv}")


def jax_flash(setting: Setting, q: int, kv: int) -> Work:
    """JAX's flash kernel; backward in two kernels."""
    names = ["q", "k_major", "k", "q_major_dkv", "k_major_dkv", "k_dkv", "q_dkv", "k_major_dq", "k_dq", "q_dq"]
    sizes_ = flash.BlockSizes(block_b=1, **{f"block_{n}": q if n.startswith("q") else kv for n in names})

    def function(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return flash.flash_attention(a, b, c, causal=setting.causal, block_sizes=sizes_)

    n = setting.length
    steps = sum(min(n // kv, -(-(i + 1) * q // kv)) for i in range(n // q)) if setting.causal else (n // q) * (n // kv)
    return _peer(setting, function, q * kv, steps, n // kv, f"{q}/{kv}")


def _peer(setting: Setting, function: Callable, pairs: int, steps: float, row: int, blocks: str) -> Work:
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        return jax.grad(lambda *x: function(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return Work(
        function=gradients if setting.backward else function,
        arguments=[tensors(setting, heads_first=True)] * 3,
        weights=[],
        pairs=pairs,
        steps=steps,
        row=row,
        moved=0,
        blocks=blocks,
    )


def peers(setting: Setting) -> dict[str, list[Callable[[], Work]]]:
    """JAX's kernels, each at several block sizes; splash takes only a head_dim of whole lanes."""
    if setting.length != LENGTH:
        return {}
    sizes_ = [(1024, 1024, 512), (512, 1024, 512)] if setting.backward else [(1024, 2048, 256), (2048, 2048, 1024)]
    if not setting.backward and setting.head_dim > 128:
        sizes_ = [(1024, 1024, 256), (1024, 2048, 256)]
    found = {"flash": [functools.partial(jax_flash, setting, n, n) for n in (512, 1024)]}
    if setting.head_dim % 128 == 0:
        found["splash"] = [functools.partial(jax_splash, setting, *n) for n in sizes_]
    return found


def measure(chip: str, setting: Setting, make: Callable[[], Work]) -> tuple[float, Work, list[tpu_static.Kernel]]:
    """Bundles for 1,000 visible pairs, added up over the kernels of the pass (not those of the pass before it)."""
    work = make()
    kernels = tpu_static.compile_for(CHIPS[chip][0], work.function, work.arguments)
    if setting.backward and len(kernels) > 1:
        kernels = [k for k in kernels if "fwd" not in k.name and "jvp" not in k.name]
    total = 0.0
    for n, kernel in enumerate(kernels):
        weights = work.weights[n] if work.weights else [1.0] * len(kernel.matrix)
        total += kernel.step(weights, work.row) * work.steps
    return 1000 * total / visible(setting), work, kernels


def lines(chip: str, setting: Setting) -> Iterator[str]:
    """A row for our kernel and one for each of JAX's at its best blocks, of those that VMEM holds."""
    _, clock, bandwidth = CHIPS[chip]
    for name, choices in {"ours": [functools.partial(ours, chip, setting)], **peers(setting)}.items():
        measured = []
        for make in choices:
            try:
                measured.append(measure(chip, setting, make))
            except jax.errors.JaxRuntimeError as refusal:
                if "RESOURCE_EXHAUSTED" not in str(refusal):
                    raise
        if not measured:
            yield f"{chip:5}{setting.name:26}{name:8} no choice of blocks fits into VMEM"
            continue
        figure, work, kernels = min(measured, key=lambda row: row[0])
        spill = max(k.busy["VSTORE:SPILL"] for k in kernels)
        line = f"{chip:5}{setting.name:26}{name:8}{figure:8.3f}  spill {spill:.2f}  {work.blocks}"
        if work.moved:
            cycles = figure * work.pairs / 1000
            line += f"  {work.moved / 2**20:.2f} MiB of {bandwidth * cycles / clock / 2**20:.2f}"
        yield line + "".join(f"  {k.name} {k.matrix}+{k.every}+{k.per_row}" for k in kernels)


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=["v5e", "v5p", "v6e"])
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--exactly", default=None, help="the setting of this name")
    given = parser.parse_args()
    chosen = [s for s in SETTINGS if (s.name == given.exactly if given.exactly else given.only in s.name)]
    for chip in given.chips:
        for setting in chosen:
            for line in lines(chip, setting):
                print(line, flush=True)
    tpu_static.clean()


if __name__ == "__main__":
    main()
