"""One step of mid-size image models on a CPU, side by side with diffusers.

    python benchmarks/flux_cpu.py [NAME ...] [--repeats 7]

512 wide, 4 heads, 3 blocks of two streams and 6 of one (Qwen-Image: 6 of two), 1,280 tokens of image and 128 of text,
float32, random weights.
Every side runs in a process of its own, in turn and with all cores. Figures are medians, the ratio is ours / theirs.
"""

import argparse
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from side_by_side import medians, serve

HEADS, HEAD_DIM, DOUBLE, SINGLE, LAYERS, TEXT, GRID = 4, 128, 3, 6, 6, 128, (32, 40)
RNG = np.random.default_rng(0)
TIME, GUIDANCE = np.array([0.5], np.float32), np.array([3.5], np.float32)


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def jitted(family, config, *given, **options):
    """A call of our forward pass with random weights."""
    import jax

    from shardzoo import zoo

    declared = family.declare(config)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(declared))))
    model = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape) * 0.02, declared)
    run = family.forward(declared, zoo.make_mesh())
    step = jax.jit(lambda model, *given: run(model, *given, **options))
    return lambda: jax.block_until_ready(step(model, *given))


def called(model, *given, **options):
    """A call of a model of diffusers."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = model.eval()
    given = [torch.tensor(x) for x in given]

    def call():
        with torch.inference_mode():
            model(*given, **options)

    return call


SIZES = dict(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=DOUBLE, num_single_layers=SINGLE)
OURS = dict(heads=HEADS, head_dim=HEAD_DIM, double_layers=DOUBLE, single_layers=SINGLE)


def flux1(ours):
    image, text, pooled = numbers(1, GRID[0] * GRID[1], 64), numbers(1, TEXT, 4096), numbers(1, 768)
    from shardzoo.zoo import flux

    ids = flux.image_ids(*GRID)
    if ours:
        config = flux.Config(**OURS, mlp=4 * HEADS * HEAD_DIM)
        return jitted(flux, config, image, text, pooled, TIME, image_ids=ids, guidance=GUIDANCE)
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**SIZES, guidance_embeds=True)
    return called(model, image, text, pooled, TIME, ids, np.zeros((TEXT, 3)), GUIDANCE)


def flux2(ours):
    image, text = numbers(1, GRID[0] * GRID[1], 128), numbers(1, TEXT, 15360)
    from shardzoo.zoo import flux2

    ids = flux2.image_ids(*GRID)
    if ours:
        config = flux2.Config(**OURS, mlp=3 * HEADS * HEAD_DIM)
        return jitted(flux2, config, image, text, TIME, image_ids=ids, guidance=GUIDANCE)
    from diffusers import Flux2Transformer2DModel

    return called(Flux2Transformer2DModel(**SIZES), image, text, TIME, ids, flux2.text_ids(TEXT), GUIDANCE)


def qwen_image(ours):
    image, text = numbers(1, GRID[0] * GRID[1], 64), numbers(1, TEXT, 3584)
    from shardzoo.zoo import qwen_image

    if ours:
        config = qwen_image.Config(heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, mlp=4 * HEADS * HEAD_DIM)
        return jitted(qwen_image, config, image, text, TIME, grids=((1, *GRID),))
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=LAYERS)
    return called(model, image, text, np.ones((1, TEXT), bool), TIME, img_shapes=[[(1, *GRID)]])


MODELS = {"flux1": flux1, "flux2": flux2, "qwen-image": qwen_image}
SIDES = {"ours": True, "diffusers": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(MODELS[args.names[0]](SIDES[args.serve]))
    for name in args.names or MODELS:
        commands = {side: [sys.executable, __file__, name, "--serve", side] for side in SIDES}
        seconds = medians(commands, args.repeats)
        for side, time in seconds.items():
            print(
                f"{name:12} {side:10} {time * 1e3:8.0f} ms   of theirs {time / seconds['diffusers']:5.2f}", flush=True
            )


if __name__ == "__main__":
    main()
