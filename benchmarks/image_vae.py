"""The image autoencoder of FLUX.1: decoding beside diffusers on a CPU, and what a TPU chip would need.

    python benchmarks/image_vae.py speed [--sizes 128x128 192x256] [--repeats 3]
    python benchmarks/image_vae.py tpu [--topology v5e:2x2] [--chips 1 4] [--pixels 1024 2048]

speed: the published sizes with random weights, float32, all cores; every side runs in a process of its own, in turn,
figures are medians, the ratio is ours / theirs. Sizes are height x width of the image.
tpu: the decoder of square images compiled ahead of time for chips that are not there (`pip install libtpu`), with the
height split over `--chips`. JAX_OPTIMIZATION_LEVEL=O1 in the environment compiles in a fraction of the time; the memory
is then that of the less tuned program.
"""

import argparse
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from side_by_side import medians, serve

PRESET = "image-vae/flux1-vae"


def latents(size: str) -> np.ndarray:
    rows, columns = (int(n) // 8 for n in size.split("x"))
    return np.random.default_rng(0).normal(size=(1, 16, rows, columns)).astype(np.float32)


def ours(size: str):
    import jax

    from shardzoo import zoo
    from shardzoo.zoo import image_vae

    declared = image_vae.declare(zoo.find_preset(PRESET)[1])
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(declared))))
    model = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape) * 0.02, declared)
    run, given = jax.jit(image_vae.decode(declared, zoo.make_mesh())), latents(size)
    return lambda: jax.block_until_ready(run(model, given))


def theirs(size: str):
    import diffusers
    import torch

    from shardzoo import zoo
    from shardzoo.convert.families.image_vae import write_config

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    fields = write_config(zoo.find_preset(PRESET)[1], "diffusers")
    model = diffusers.AutoencoderKL(**{k: v for k, v in fields.items() if not k.startswith("_")}).eval()
    given = torch.tensor(latents(size))

    def call():
        with torch.inference_mode():
            model.decode(given)

    return call


SIDES = {"ours": ours, "theirs": theirs}


def speed(sizes: list[str], repeats: int) -> None:
    for size in sizes:
        commands = {side: [sys.executable, __file__, "serve", side, size] for side in SIDES}
        found = medians(commands, repeats)
        ratio = found["ours"] / found["theirs"]
        print(f"{size:>9} ours {found['ours']:7.2f} s  theirs {found['theirs']:7.2f} s  ratio {ratio:.2f}", flush=True)


def tpu(topology: str, chips: list[int], pixels: list[int]) -> None:
    import jax.numpy as jnp

    from shardzoo import zoo
    from shardzoo.cli.topology import compile_forward, topology_devices
    from shardzoo.zoo.families import TraceSizes

    family, config = zoo.find_preset(PRESET)
    devices = topology_devices(topology)
    for size in pixels:
        for count in chips:
            sizes, degrees = TraceSizes(height=size, width=size), zoo.Degrees(context=count)
            found = compile_forward(
                family, family.declare(config), degrees, devices[:count], sizes, jnp.bfloat16, "full"
            )
            print(f"{size}x{size}, bfloat16, context={count}")
            print("\n".join(found.lines()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("speed")
    command.add_argument("--sizes", nargs="+", default=["128x128", "192x256"])
    command.add_argument("--repeats", type=int, default=3)
    command = commands.add_parser("serve")
    command.add_argument("side", choices=SIDES)
    command.add_argument("size")
    command = commands.add_parser("tpu")
    command.add_argument("--topology", default="v5e:2x2")
    command.add_argument("--chips", type=int, nargs="+", default=[1, 4])
    command.add_argument("--pixels", type=int, nargs="+", default=[1024, 2048])
    args = parser.parse_args()
    if args.command == "serve":
        serve(SIDES[args.side](args.size))
    elif args.command == "tpu":
        tpu(args.topology, args.chips, args.pixels)
    else:
        speed(getattr(args, "sizes", ["128x128", "192x256"]), getattr(args, "repeats", 3))


if __name__ == "__main__":
    main()
