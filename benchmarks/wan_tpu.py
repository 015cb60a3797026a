"""What a step of Wan 14B needs on each chip of a TPU slice, by the TPU compiler alone (`pip install libtpu`).

    python benchmarks/wan_tpu.py [NAME ...]

bfloat16 weights, all 40 layers, one row, the keys of the text kept, the "seq" residual. `weights` are all of the
model's on a chip; `arguments` leave out those that a step does not read (text embedding, keys of the text); `peak` is
of arguments, results and temporaries together. It leaves less for temporaries than the compiler's own figure for them,
which is larger than the heap of its buffer assignment. Times are wall clock, so compile on an idle machine.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import tpu_compiled

from shardzoo import zoo
from shardzoo.cli.topology import topology_devices
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
    described = tpu_compiled.describe(step, model, latents, times, Context(kept))
    return f"weights {weights / tpu_compiled.GIB:5.2f}  {described}"


if __name__ == "__main__":
    tpu_compiled.main(__doc__, CASES, measure)
