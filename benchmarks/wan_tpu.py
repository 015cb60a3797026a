"""What a step of Wan 14B needs on each chip of a TPU slice, by the TPU compiler alone (`pip install libtpu`).

    python benchmarks/wan_tpu.py [NAME ...]

bfloat16 weights, all 40 layers, one row, the keys of the text kept, the "seq" residual. `weights` are all of the
model's on a chip; `arguments` leave out those that a step does not read (text embedding, keys of the text); `peak` is
of arguments, results and temporaries together. It leaves less for temporaries than the compiler's own figure for them,
which is larger than the heap of its buffer assignment. Times are wall clock, so compile on an idle machine.
"""

import argparse
import collections
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from shardzoo import zoo
from shardzoo.cli.topology import COLLECTIVE, topology_devices
from shardzoo.zoo import layout
from shardzoo.zoo.wan import CONTEXT_SPEC, TEXT_TOKENS, Context

SD, HD = (21, 60, 104), (21, 90, 160)  # latents of 81 frames of 480 x 832 and 720 x 1280: 32,760 and 75,600 tokens
CASES = {  # name -> (slice, degrees, whether weights are split over context at rest, video)
    "tp4": ("v5p:2x2x1", dict(tensor=4), False, SD),
    "tp2-context2": ("v5p:2x2x1", dict(tensor=2, context=2), False, SD),
    "context4-at-rest": ("v5p:2x2x1", dict(context=4), True, SD),
    "720p-v5e-tp4": ("v5e:2x2", dict(tensor=4), False, HD),
    "720p-v5e-tp4-context2": ("v5e:2x4", dict(tensor=4, context=2), False, HD),
}
GIB = 2**30


def measure(name: str) -> str:
    topology, degrees, at_rest, sizes = CASES[name]
    declared = zoo.wan.declare(zoo.wan.PRESETS["wan2.1-t2v-14b"], jnp.bfloat16)
    declared = layout.split_at_rest(declared, "context", zoo.Degrees(**degrees)) if at_rest else declared
    mesh = zoo.make_mesh(**degrees, devices=topology_devices(topology))
    forward = zoo.wan.forward(declared, mesh, residual="seq")
    c, placed = declared.config, jax.NamedSharding(mesh, CONTEXT_SPEC)
    kept = jax.ShapeDtypeStruct((c.layers, 2, 1, TEXT_TOKENS, c.heads, c.head_dim), jnp.bfloat16, sharding=placed)
    latents, times = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, c.in_channels, *sizes), (1,)))

    def step(model, latents, times, kept):
        return forward(model, latents, times, context=kept)

    model = layout.abstract(declared, mesh)
    weights = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(model))
    begin = time.perf_counter()
    lowered = jax.jit(step).lower(model, latents, times, Context(kept))
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    found = collections.Counter(COLLECTIVE.findall(compiled.as_text()))
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()) if n)
    return (
        f"{name:22} {topology:10} trace {traced - begin:5.1f} s  compile {done - traced:6.1f} s"
        f"  weights {weights / GIB:5.2f}  arguments {memory.argument_size_in_bytes / GIB:5.2f}"
        f"  temporaries {memory.temp_size_in_bytes / GIB:5.2f}  peak {memory.peak_memory_in_bytes / GIB:5.2f} GiB"
        f"  ({counts})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help=", ".join(CASES))
    for name in parser.parse_args().names or CASES:
        print(measure(name), flush=True)


if __name__ == "__main__":
    main()
