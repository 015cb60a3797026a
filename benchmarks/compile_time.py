"""Compile time of a decoder's forward pass, gradient and generation as it grows deeper: flat, as blocks are scanned.

    python benchmarks/compile_time.py [--layers 4 16 64]

Tracing, lowering and compiling of a small model, the best of `--repeats` runs, and the ratio to the first depth.
"""

import argparse
import dataclasses
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from shardzoo import zoo
from shardzoo.zoo import layout
from shardzoo.zoo.generate import generate

CONFIG = zoo.decoder.Config(vocab=512, embed=64, layers=4, heads=8, kv_heads=4, head_dim=16, mlp=128)


def programs(layers):
    """Name -> function that compiles it anew."""
    config = dataclasses.replace(CONFIG, layers=layers)
    declared, mesh = zoo.decoder.declare(config), zoo.make_mesh()
    model = layout.abstract(declared, mesh)
    tokens, lengths = jax.ShapeDtypeStruct((2, 32), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def forward():
        f = zoo.decoder.forward(declared, mesh)
        jax.jit(lambda m, t: f(m, t)).lower(model, tokens).compile()

    def gradient():
        f = zoo.decoder.forward(declared, mesh)
        jax.jit(jax.grad(lambda m, t: f(m, t).sum())).lower(model, tokens).compile()

    def generation():
        run = generate(declared, mesh)
        jax.jit(lambda m, t, n: run(m, t, n, max_new_tokens=8)).lower(model, tokens, lengths).compile()

    return {"forward": forward, "gradient": gradient, "generate": generation}


def seconds(call) -> float:
    jax.clear_caches()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    best: dict[tuple[str, int], float] = {}
    for _ in range(args.repeats):  # depths alternate, so that a busy moment of the machine falls on all of them
        for layers in args.layers:
            for name, call in programs(layers).items():
                best[name, layers] = min(best.get((name, layers), float("inf")), seconds(call))
    print(f"{'':10}" + "".join(f"{layers:>6} layers" for layers in args.layers) + "   last / first")
    for name in ("forward", "gradient", "generate"):
        times = [best[name, layers] for layers in args.layers]
        print(f"{name:10}" + "".join(f"{t:11.2f} s" for t in times) + f"   {times[-1] / times[0]:.2f}")


if __name__ == "__main__":
    main()
