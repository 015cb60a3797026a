"""What a step of Wan 14B needs on each chip of a TPU slice, by the TPU compiler alone (`pip install libtpu`).

    python benchmarks/wan_tpu.py [NAME ...] [--vidax PYTHON]

bfloat16 weights, all 40 layers, one row, the keys of the text kept, the "seq" residual. `weights` are all of the
model's on a chip; `arguments` leave out those that a step does not read (text embedding, keys of the text); `peak` is
of arguments, results and temporaries together. It leaves less for temporaries than the compiler's own figure for them,
which is larger than the heap of its buffer assignment. Times are wall clock, so compile on an idle machine.

`--vidax` names a Python that has vidax (`python -m venv V && V/bin/pip install vidax==0.1.0 libtpu`). In the cases that
it has too, its own code is compiled after ours (`vidax_tpu.py`): its blocks unrolled, all 40 at tensor 4 and only 4 of
them where it splits the sequence. The ratio is its CPU seconds of compiling to ours, which are of 40 in both.
"""

import json
import os
import pathlib
import subprocess

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
VIDAX_LAYERS = {"tp4": 40, "tp2-context2": 4}


def vidax(python: str, name: str, ours: float) -> str:
    """What vidax needs in a case, beside the CPU seconds that our compiling took."""
    script = pathlib.Path(__file__).with_name("vidax_tpu.py")
    command = [python, str(script), name, "--layers", str(VIDAX_LAYERS[name])]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    cost = f"compile {found['seconds']:.1f} s ({found['cpu']:.1f} of CPU, {found['cpu'] / ours:.1f} times ours)"
    sizes = f"weights {found['weights']:.2f}  temporaries {found['temporaries']:.2f} GiB"
    return f"vidax, {VIDAX_LAYERS[name]} layers: {cost}  {sizes}"


def measure(name: str, python: str | None) -> str:
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
    described = tpu_compiled.compiled(step, model, latents, times, Context(kept))
    beside = f"\n    {vidax(python, name, described.cpu)}" if python and name in VIDAX_LAYERS else ""
    return f"weights {weights / tpu_compiled.GIB:5.2f}  {described.text}{beside}"


if __name__ == "__main__":
    parser = tpu_compiled.parser(__doc__, CASES)
    parser.add_argument("--vidax", metavar="PYTHON", help="the Python that has vidax; left out otherwise")
    args = parser.parse_args()
    tpu_compiled.report(args.names, CASES, lambda name: measure(name, args.vidax))
