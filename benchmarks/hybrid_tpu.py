"""What Qwen3.5-27B needs on each chip of a TPU slice, by the TPU compiler alone (`pip install libtpu`).

    python benchmarks/hybrid_tpu.py [NAME ...]

bfloat16 weights, all 64 layers, one row. `prefill-*` fill both caches with a prompt and give the logits after it,
`decode-*` feed one token to caches of that length, in place. `peak` is of arguments, results and temporaries together.
Times are wall clock, so compile on an idle machine.
"""

import argparse
import collections
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import P

from shardzoo import zoo
from shardzoo.cli.topology import COLLECTIVE, topology_devices
from shardzoo.zoo import layout, qwen3_5
from shardzoo.zoo.cache import Cache, spare_slots
from shardzoo.zoo.delta_net import Recurrent
from shardzoo.zoo.generate import State
from shardzoo.zoo.mesh import CONTEXT, DATA
from shardzoo.zoo.qwen3_5_generate import ENGINE, HybridCache

CASES = {  # name -> (slice, degrees, tokens)
    "prefill-32k": ("v5p:2x2x2", dict(context=2, tensor=4), 32768),
    "prefill-262k": ("v5p:2x2x4", dict(context=4, tensor=4), 262144),
    "decode-262k": ("v5p:2x2x1", dict(tensor=4), 262144),
}
CONFIG = qwen3_5.PRESETS["qwen3.5-27b"]
GIB = 2**30


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def prefill(declared, mesh, tokens):
    def f(model, prompt, lengths):
        return ENGINE.prefill(ENGINE.gather_ends(model, declared, to="invarying"), declared, prompt, lengths, 1, None)

    specs = (layout.specs(declared), P(DATA, CONTEXT), P(DATA))
    run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(ENGINE.cache_specs, P(DATA)))
    return jax.jit(run), (shape(1, tokens), shape(1))


def decode(declared, mesh, tokens):
    c = CONFIG
    slots = tokens + spare_slots(1, 1)
    kv = shape(c.super_blocks, 1, slots, c.kv_heads * c.head_dim, dtype=jnp.bfloat16)
    delta = c.layers - c.super_blocks
    channels = 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim
    cache = HybridCache(
        attn=Cache(k=kv, v=kv, positions=shape(1, slots)),
        shift=shape(1),
        delta=Recurrent(
            tail=shape(delta, 1, c.taps - 1, channels, dtype=jnp.bfloat16),
            state=shape(delta, 1, c.value_heads, c.key_dim, c.value_dim, dtype=jnp.float32),
        ),
    )
    state = State(
        cache=cache, prompt=shape(1), step=shape(), token=shape(1), done=shape(1, dtype=bool),
        running=shape(dtype=bool), tokens=shape(1, 2), lengths=shape(1),
    )  # fmt: skip

    def f(model, state):
        return ENGINE.decode_step(ENGINE.gather_ends(model, declared, to="invarying"), declared, state, None)

    specs = (layout.specs(declared), ENGINE.state_specs)
    run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(ENGINE.cache_specs, P(DATA)))
    return jax.jit(run, donate_argnums=1), (state,)


def measure(name: str) -> str:
    topology, degrees, tokens = CASES[name]
    declared = qwen3_5.declare(CONFIG, jnp.bfloat16)
    mesh = zoo.make_mesh(**degrees, kv_heads=CONFIG.kv_heads, devices=topology_devices(topology))
    run, inputs = (prefill if name.startswith("prefill") else decode)(declared, mesh, tokens)
    begin = time.perf_counter()
    lowered = run.lower(layout.abstract(declared, mesh), *inputs)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    found = collections.Counter(COLLECTIVE.findall(compiled.as_text()))
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()) if n)
    return (
        f"{name:13} {topology:10} trace {traced - begin:5.1f} s  compile {done - traced:6.1f} s"
        f"  arguments {memory.argument_size_in_bytes / GIB:5.2f}  results {memory.output_size_in_bytes / GIB:5.2f}"
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
