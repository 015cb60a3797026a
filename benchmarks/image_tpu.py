"""What a step of a large image model needs on each chip of a TPU slice, by the TPU compiler alone (`libtpu` installed).

    python benchmarks/image_tpu.py [NAME ...]

bfloat16 weights (int8 where the name says so), all layers, one image of 1024 x 1024, 512 tokens of text. `peak` is of
arguments, results and temporaries together, per chip. `compile` is wall clock and CPU seconds of the compiler: to be
run on an idle machine.
"""

import argparse
import collections
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from shardzoo import zoo
from shardzoo.cli.topology import COLLECTIVE, topology_devices
from shardzoo.zoo import layout, quantize
from shardzoo.zoo.families import TraceSizes

CASES = {  # name -> (preset, slice, degree of the tensor axes, kind of quantized weights)
    "flux2-dev-v5e-8": ("flux2/flux2-dev", "v5e:2x4", 8, None),
    "flux2-dev-v6e-4": ("flux2/flux2-dev", "v6e:2x2", 4, None),
    "flux2-dev-int8-v5e-4": ("flux2/flux2-dev", "v5e:2x2", 4, "int8"),
    "flux1-dev-v5e-4": ("flux/flux1-dev", "v5e:2x2", 4, None),
    "qwen-image-v5e-4": ("qwen-image/qwen-image", "v5e:2x2", 4, None),
}
SIZES = TraceSizes(batch=1, tokens=512, height=1024, width=1024)
GIB = 2**30


def measure(name: str) -> str:
    preset, topology, degree, kind = CASES[name]
    family, config = zoo.find_preset(preset)
    declared = layout.astype(family.declare(config), jnp.bfloat16)
    declared = declared if kind is None else quantize.declare(declared, kind)
    mesh = zoo.make_mesh(tensor=degree, devices=topology_devices(topology))
    f, arrays = family.trace(declared, mesh, SIZES)
    begin = time.perf_counter()
    lowered = jax.jit(f).lower(layout.abstract(declared, mesh), *arrays)
    traced, cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    done, cpu = time.perf_counter(), time.process_time() - cpu
    memory = compiled.memory_analysis()
    found = collections.Counter(COLLECTIVE.findall(compiled.as_text()))
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()) if n)
    return (
        f"{name:24} {topology:8} trace {traced - begin:5.1f} s  compile {done - traced:5.1f} s ({cpu:5.1f} of CPU)"
        f"  arguments {memory.argument_size_in_bytes / GIB:5.2f}  temporaries {memory.temp_size_in_bytes / GIB:5.2f}"
        f"  peak {memory.peak_memory_in_bytes / GIB:5.2f} GiB  ({counts})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help=", ".join(CASES))
    for name in parser.parse_args().names or CASES:
        print(measure(name), flush=True)


if __name__ == "__main__":
    main()
