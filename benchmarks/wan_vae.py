"""The Wan autoencoders: speed beside diffusers on a CPU, memory as clips grow, and what a TPU chip would need.

    python benchmarks/wan_vae.py speed [--sizes 16x5x6x8 ...] [--repeats 3]
    python benchmarks/wan_vae.py memory [--frames 17 81]
    python benchmarks/wan_vae.py tpu [--preset wan2.1-vae] [--topology v5e:2x2] [--chips 1 4]

speed: decoding of random latents, the same sizes and weights' sizes on both sides, float32, all cores; runs of the two
sides alternate, the figures are the best of `--repeats`, the ratio is ours / theirs (below 1: we are faster). A size is
width x latent frames x rows x columns of latents; compiling is left out.
memory: what XLA allocates for temporaries of a compiled decoder, and the peak resident size of a process that runs it
over the size before, less the video: both are to stay flat while the clip grows.
tpu: the 720p decoder compiled ahead of time for chips that are not there (`pip install libtpu`).
At full effort XLA tunes each of the 70 convolutions for several seconds; JAX_OPTIMIZATION_LEVEL=O1 in the environment
compiles them in a fifth of the time. The memory printed is then that of the less tuned program.
"""

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from shardzoo import zoo
from shardzoo.zoo import layout, wan_vae
from shardzoo.zoo.families import TraceSizes

MIB = 2**20


def sized(width: int) -> wan_vae.Config:
    return dataclasses.replace(wan_vae.PRESETS["wan2.1-vae"], width=width, decoder_width=width)


def filled(config: wan_vae.Config):
    """A live model of random weights, and its declaration."""
    declared, rng = wan_vae.declare(config), np.random.default_rng(0)
    values = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32) * 0.05, declared)
    return layout.place(declared, zoo.make_mesh(), values), declared


def seconds(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def speed(sizes: list[str], repeats: int) -> None:
    import diffusers
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    threads = torch.get_num_threads()
    print(f"jax {jax.__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}, {threads} threads")
    print(f"{'width':>5} {'video':>14} {'ours':>9} {'theirs':>9} {'ratio':>6}")
    for size in sizes:
        width, frames, rows, columns = map(int, size.split("x"))
        latents = np.random.default_rng(1).normal(size=(1, 16, frames, rows, columns)).astype(np.float32)
        model, declared = filled(sized(width))
        run = jax.jit(wan_vae.decode(declared, zoo.make_mesh()))
        theirs = diffusers.AutoencoderKLWan(base_dim=width).eval()

        def ours_once(run=run, model=model, latents=latents):
            jax.block_until_ready(run(model, latents))

        def theirs_once(theirs=theirs, latents=latents):
            with torch.inference_mode():
                theirs.decode(torch.tensor(latents))

        sides = (ours_once, theirs_once)
        for side in sides:
            side()
        times = [[seconds(side) for side in sides] for _ in range(repeats)]
        a, b = (min(column) for column in zip(*times, strict=True))
        video = f"{4 * frames - 3}x{8 * rows}x{8 * columns}"
        print(f"{width:5} {video:>14} {a:7.3f} s {b:7.3f} s {a / b:6.2f}", flush=True)


def memory(frames: list[int], width: int = 16, rows: int = 12, columns: int = 20) -> None:
    print(f"width {width}, {8 * rows}x{8 * columns} pixels, float32")
    print(f"{'frames':>6} {'temporaries':>12} {'video':>10} {'resident over weights and video':>32}")
    for count in frames:
        args = [sys.executable, __file__, "one", *map(str, (count, width, rows, columns))]
        temporary, video, resident = subprocess.run(args, check=True, capture_output=True, text=True).stdout.split()
        print(f"{count:6} {temporary:>8} MiB {video:>6} MiB {resident:>28} MiB", flush=True)


def one(count: int, width: int, rows: int, columns: int) -> None:
    """The figures of one clip length, by a process of its own."""
    model, declared = filled(sized(width))
    latents = np.zeros((1, 16, 1 + (count - 1) // 4, rows, columns), np.float32)
    compiled = jax.jit(wan_vae.decode(declared, zoo.make_mesh())).lower(model, latents).compile()
    analysis = compiled.memory_analysis()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    jax.block_until_ready(compiled(model, latents))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - analysis.output_size_in_bytes
    print(*(round(x / MIB) for x in (analysis.temp_size_in_bytes, analysis.output_size_in_bytes, grown)))


def tpu(preset: str, topology: str, chips: list[int], dtypes: list[str]) -> None:
    from shardzoo.cli.topology import compile_forward, topology_devices
    from shardzoo.zoo.mesh import Degrees

    family, config = zoo.find_preset(f"wan-vae/{preset}")
    devices = topology_devices(topology)
    sizes = TraceSizes(frames=81, height=720, width=1280)
    for count in chips:
        for dtype in dtypes:
            degrees, declared = Degrees(context=count), family.declare(config)
            found = compile_forward(family, declared, degrees, devices[:count], sizes, jnp.dtype(dtype), "full")
            print(f"{preset}, 81 frames of 720x1280, {dtype}, context={count}")
            print("\n".join(found.lines()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("speed")
    command.add_argument("--sizes", nargs="+", default=["8x3x4x4", "32x5x8x12", "96x5x8x12"])
    command.add_argument("--repeats", type=int, default=3)
    command = commands.add_parser("memory")
    command.add_argument("--frames", type=int, nargs="+", default=[17, 81])
    command = commands.add_parser("one")
    command.add_argument("sizes", type=int, nargs=4)
    command = commands.add_parser("tpu")
    command.add_argument("--preset", default="wan2.1-vae")
    command.add_argument("--topology", default="v5e:2x2")
    command.add_argument("--chips", type=int, nargs="+", default=[1, 4])
    command.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    if args.command == "tpu":
        tpu(args.preset, args.topology, args.chips, args.dtypes)
    elif args.command == "one":
        one(*args.sizes)
    elif args.command == "memory":
        memory(args.frames)
    elif args.command == "speed":
        speed(args.sizes, args.repeats)
    else:
        speed(command.get_default("sizes") or ["8x3x4x4", "32x5x8x12", "96x5x8x12"], 3)
        memory([17, 81])


if __name__ == "__main__":
    main()
