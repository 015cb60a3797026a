"""The blockwise attention beside `jax.nn.dot_product_attention` on this machine's CPU, in one run.

    python benchmarks/attention_cpu.py [--rounds N] [--only TEXT]

Times: the two sides take turns; the least wall time and the least processor time of all rounds, and their ratios
(above 1: blockwise is faster). Processor time is the figure to read when the machine does other work as well.
Memory: the temporary bytes of the compiled program, by length, forward and gradient.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardzoo.kernels.flash_attention import flash_attention


@dataclass(frozen=True)
class Setting:
    """One call to time; `gradient` times value and gradient of q, k, v."""

    name: str
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 128
    causal: bool = False
    gradient: bool = False
    dtype: str = "float32"


SETTINGS = [
    Setting("4096", 4096, 4096),
    Setting("4096 causal", 4096, 4096, causal=True),
    Setting("4096 gradient", 4096, 4096, gradient=True),
    Setting("4096 causal gradient", 4096, 4096, causal=True, gradient=True),
    Setting("4096 bfloat16", 4096, 4096, dtype="bfloat16"),
    Setting("4096 head 64 gqa 8/2", 4096, 4096, heads=8, kv_heads=2, head_dim=64, causal=True),
    Setting("cross 4096 x 512", 4096, 512),
    Setting("prefill 256 gqa 9/3", 256, 256, heads=9, kv_heads=3, head_dim=64, causal=True),
    Setting("batch 8 x 128", 128, 128, batch=8, heads=8, kv_heads=8, head_dim=64),
    Setting("batch 8 x 128 gradient", 128, 128, batch=8, heads=8, kv_heads=8, head_dim=64, gradient=True),
    Setting("decode 4096 gqa 32/8", 1, 4096, heads=32, kv_heads=8),
    Setting("decode 512 gqa 9/3 batch 4", 1, 512, batch=4, heads=9, kv_heads=3, head_dim=64),
]


def inputs(s: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((s.q_len, s.heads), (s.kv_len, s.kv_heads), (s.kv_len, s.kv_heads))
    return tuple(
        jax.random.normal(k, (s.batch, n, h, s.head_dim), s.dtype) for k, (n, h) in zip(keys, shapes, strict=True)
    )


def program(s: Setting, attend: Callable) -> Callable:
    """The call, or its gradient, compiled."""

    def loss(q, k, v):
        return jnp.square(attend(q, k, v).astype(jnp.float32)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)) if s.gradient else attend)


def sides(s: Setting) -> dict[str, Callable]:
    # Of a single query both sides let it see every key.
    causal = s.causal and s.q_len == s.kv_len
    return {
        "blockwise": program(s, lambda q, k, v: flash_attention(q, k, v, causal=causal, implementation="blockwise")),
        "jax.nn": program(s, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal)),
    }


def times(s: Setting, rounds: int) -> dict[str, tuple[float, float]]:
    """Least wall and processor seconds of a call, by side."""
    arrays = inputs(s)
    both = sides(s)
    for run in both.values():
        jax.block_until_ready(run(*arrays))
    best = dict.fromkeys(both, (float("inf"), float("inf")))
    for _ in range(rounds):
        for side, run in both.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arrays))
            spent = time.perf_counter() - wall, time.process_time() - cpu
            best[side] = tuple(map(min, best[side], spent))
    return best


def memory(lengths: tuple[int, ...]) -> Iterator[str]:
    """Temporary bytes of each side by length; nothing is run."""
    for gradient in (False, True):
        for length in lengths:
            s = Setting("", length, length, gradient=gradient)
            row = []
            for side, run in sides(s).items():
                stats = run.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(s))).compile()
                row.append(f"{side} {stats.memory_analysis().temp_size_in_bytes / 2**20:10,.1f} MiB")
            yield f"{'gradient' if gradient else 'forward ':8} {length:6}  " + "  ".join(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="settings whose name holds this text; 'memory' for memory alone")
    only, rounds = (a := parser.parse_args()).only, a.rounds
    print(f"{'seconds, least of ' + str(rounds):28}{'blockwise wall / cpu':>24}{'jax.nn wall / cpu':>24}{'ratio':>18}")
    for s in SETTINGS:
        if only not in s.name:
            continue
        (wall, cpu), (jax_wall, jax_cpu) = times(s, rounds).values()
        ratio = f"{jax_wall / wall:8.2f} /{jax_cpu / cpu:6.2f}"
        print(f"{s.name:28}{wall:14.5f} / {cpu:7.5f}{jax_wall:14.5f} / {jax_cpu:7.5f}{ratio:>18}", flush=True)
    if only in "memory":
        print("\ntemporary memory of the compiled program, 1 x length x 4 heads x 128, float32")
        for line in memory((4096, 8192, 16384, 32768)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
