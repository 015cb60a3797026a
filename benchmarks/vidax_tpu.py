"""What vidax's Wan 14B needs on each chip of a TPU slice, with its own code and sharding; run by `wan_tpu.py --vidax`.

    PYTHON benchmarks/vidax_tpu.py tp4 | tp2-context2 [--layers N]

For a Python with vidax 0.1.0 and libtpu, and without this project. Prints a line of JSON: seconds of wall clock and of
CPU to compile, and GiB. Weights and latents are bfloat16, 81 frames of 480 x 832, 512 tokens of text, one row.
vidax asks `jax.devices()` whether it is on a TPU, which is answered here with the chips of the slice.
"""

import argparse
import json
import math
import os
import time

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
os.environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-8")
os.environ.update(TPU_STDERR_LOG_LEVEL="3", TPU_MIN_LOG_LEVEL="3")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

CASES = {"tp4": (4, 1), "tp2-context2": (2, 2)}  # name -> tensor and sequence parallel sizes
FRAMES, HEIGHT, WIDTH = 21, 60, 104  # latents


def abstract(tree, dtype, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), tree, shardings)


def lowered(tensor: int, sequence: int, layers: int):
    """The forward pass, lowered, and the bytes of its weights on each chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    jax.devices, jax.device_count = lambda *_: devices, lambda *_: len(devices)

    from vidax.core.rope3d import create_rope3d_freqs
    from vidax.core.sharding import build_tpu_mesh, shard_wan_params, to_partition_specs
    from vidax.models.wan.wan2_1 import WanDiT
    from vidax.models.wan.wan2_1.configs import T2V_14B_CONFIG

    mesh, sizes = build_tpu_mesh(1, tensor, sequence), {**T2V_14B_CONFIG, "num_layers": layers}
    grid, head = (FRAMES, HEIGHT // 2, WIDTH // 2), sizes["dim"] // sizes["num_heads"]
    shapes = (
        jax.ShapeDtypeStruct((1, FRAMES, HEIGHT, WIDTH, sizes["in_dim"]), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), jnp.float32),
        jax.eval_shape(lambda: create_rope3d_freqs(*grid, head)),
        jax.ShapeDtypeStruct((1, sizes["text_len"], sizes["text_dim"]), jnp.bfloat16),
    )
    params = jax.eval_shape(WanDiT(**sizes).init, jax.random.key(0), *shapes)
    placed = shard_wan_params(params, mesh)
    params = abstract(params, jnp.bfloat16, placed)
    whole = NamedSharding(mesh, P())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
    model = WanDiT(**sizes, mesh=mesh, sequence_parallel=sequence > 1)
    run = model.apply
    if sequence > 1:
        specs = (to_partition_specs(placed), *jax.tree.map(lambda _: P(), shapes))
        run = jax.shard_map(model.apply, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return jax.jit(run).lower(params, *given), held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--layers", type=int, default=40)
    args = parser.parse_args()
    program, held = lowered(*CASES[args.name], args.layers)
    begin, cpu = time.perf_counter(), time.process_time()
    compiled = program.compile()
    figures = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "weights": held / 2**30}
    memory = compiled.memory_analysis()
    print(json.dumps({**figures, "temporaries": memory.temp_size_in_bytes / 2**30}))


if __name__ == "__main__":
    main()
