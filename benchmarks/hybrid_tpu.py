"""What Qwen3.5-27B needs on each chip of a TPU slice, by the TPU compiler alone (`pip install libtpu`).

    python benchmarks/hybrid_tpu.py [NAME ...]

bfloat16 weights, all 64 layers. `prefill-*` fill both caches with a prompt and give the logits after it, `decode-*`
feed one token to caches of that length, in place, both for one row; `train-*` give loss and gradient by "1f1b" of eight
rows, one a microbatch. `peak` is of arguments, results and temporaries together. Times are wall clock, so compile on an
idle machine.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import tpu_compiled
from jax import P

from shardzoo import zoo
from shardzoo.cli.topology import topology_devices
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
    "prefill-32k-pipe2": ("v5p:2x2x2", dict(pipe=2, tensor=4), 32768),
    "train-4k-pipe2": ("v5p:2x2x2", dict(pipe=2, tensor=4), 4096),
}
ROWS = 8  # of training
CONFIG = qwen3_5.PRESETS["qwen3.5-27b"]


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


def train(declared, mesh, tokens):
    rows = shape(ROWS, tokens)
    return jax.jit(qwen3_5.loss_and_grad(declared, mesh, residual="seq", remat=True, microbatches=ROWS)), (rows, rows)


def measure(name: str) -> str:
    topology, degrees, tokens = CASES[name]
    declared = qwen3_5.declare(CONFIG, jnp.bfloat16)
    mesh = zoo.make_mesh(**degrees, kv_heads=CONFIG.kv_heads, devices=topology_devices(topology))
    make = {"prefill": prefill, "decode": decode, "train": train}[name.split("-")[0]]
    run, inputs = make(declared, mesh, tokens)
    return tpu_compiled.describe(run, layout.abstract(declared, mesh), *inputs)


if __name__ == "__main__":
    tpu_compiled.main(__doc__, CASES, measure)
