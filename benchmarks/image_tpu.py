"""What a step of a large image model needs on each chip of a TPU slice, by the TPU compiler alone (`libtpu` installed).

    python benchmarks/image_tpu.py [NAME ...]

bfloat16 weights (int8 where the name says so), all layers, one image of 1024 x 1024, 512 tokens of text. `peak` is of
arguments, results and temporaries together, per chip. `compile` is wall clock and CPU seconds of the compiler: to be
run on an idle machine.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import tpu_compiled

from shardzoo import zoo
from shardzoo.cli.topology import topology_devices
from shardzoo.zoo import layout, quantize
from shardzoo.zoo.families import TraceSizes

CASES = {  # name -> (slice, preset, degree of the tensor axes, kind of quantized weights)
    "flux2-dev-v5e-8": ("v5e:2x4", "flux2/flux2-dev", 8, None),
    "flux2-dev-v6e-4": ("v6e:2x2", "flux2/flux2-dev", 4, None),
    "flux2-dev-int8-v5e-4": ("v5e:2x2", "flux2/flux2-dev", 4, "int8"),
    "flux1-dev-v5e-4": ("v5e:2x2", "flux/flux1-dev", 4, None),
    "qwen-image-v5e-4": ("v5e:2x2", "qwen-image/qwen-image", 4, None),
}
SIZES = TraceSizes(batch=1, tokens=512, height=1024, width=1024)


def measure(name: str) -> str:
    topology, preset, degree, kind = CASES[name]
    family, config = zoo.find_preset(preset)
    declared = layout.astype(family.declare(config), jnp.bfloat16)
    declared = declared if kind is None else quantize.declare(declared, kind)
    mesh = zoo.make_mesh(tensor=degree, devices=topology_devices(topology))
    f, arrays = family.trace(declared, mesh, SIZES)
    return tpu_compiled.describe(f, layout.abstract(declared, mesh), *arrays)


if __name__ == "__main__":
    tpu_compiled.main(__doc__, CASES, measure)
