"""One step of a mid-size Wan model on a CPU, side by side with vidax and diffusers.

    python benchmarks/wan_cpu.py [--vidax PYTHON] [--repeats 7]

512 wide, 4 heads, 6 layers, 1,280 tokens of video, 512 of text, float32, random weights. Every side runs in a process
of its own, in turn and with all cores. Figures are medians, the ratio is theirs / ours (above 1: we are faster).
`ours` does the same work as the others; `ours, keys kept` has the keys of the text from `wan.context`, as in sampling.
vidax pins other versions than this project, so that it needs an environment of its own, whose Python `--vidax` names:
`python -m venv V && V/bin/pip install vidax==0.1.0`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

EMBED, HEADS, LAYERS, MLP, TEXT = 512, 4, 6, 2048, 4096
FRAMES, SIDE = 5, 32  # latents; 5 x 16 x 16 tokens
RNG = np.random.default_rng(0)
LATENTS = RNG.normal(size=(1, 16, FRAMES, SIDE, SIDE)).astype(np.float32)
WORDS = RNG.normal(size=(1, 512, TEXT)).astype(np.float32)
TIME = np.array([500.0], np.float32)


def ours(kept=False):
    import jax

    from shardzoo import zoo

    config = zoo.wan.Config(
        in_channels=16, out_channels=16, heads=HEADS, head_dim=EMBED // HEADS, layers=LAYERS, mlp=MLP, text=TEXT
    )
    declared, mesh = zoo.wan.declare(config), zoo.make_mesh()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(declared))))
    model = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape) * 0.02, declared)
    step = jax.jit(zoo.wan.forward(declared, mesh))
    given = {"context": jax.jit(zoo.wan.context(declared, mesh))(model, WORDS)} if kept else {"text": WORDS}
    return lambda: jax.block_until_ready(step(model, LATENTS, TIME, **given))


def vidax():
    import jax
    import jax.numpy as jnp
    from vidax.core.rope3d import create_rope3d_freqs
    from vidax.models.wan.wan2_1 import WanDiT

    model = WanDiT(
        dim=EMBED, ffn_dim=MLP, num_heads=HEADS, num_layers=LAYERS, text_dim=TEXT, compute_dtype=jnp.float32
    )  # fmt: skip
    freqs = create_rope3d_freqs(FRAMES, SIDE // 2, SIDE // 2, EMBED // HEADS)
    latents = LATENTS.transpose(0, 2, 3, 4, 1)
    params = model.init(jax.random.key(0), latents, TIME, freqs, WORDS)
    step = jax.jit(model.apply)
    return lambda: jax.block_until_ready(step(params, latents, TIME, freqs, WORDS))


def diffusers():
    import torch
    from diffusers import WanTransformer3DModel

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=EMBED // HEADS, ffn_dim=MLP, num_layers=LAYERS, text_dim=TEXT
    ).eval()
    given = [torch.tensor(x) for x in (LATENTS, TIME, WORDS)]

    def call():
        with torch.inference_mode():
            model(*given)

    return call


SIDES = {"ours": ours, "ours, keys kept": lambda: ours(True), "vidax": vidax, "diffusers": diffusers}


def serve(side: str) -> None:
    """Runs the side once for each line that comes in, and answers with the seconds."""
    call = SIDES[side]()
    call()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        call()
        print(time.perf_counter() - begin, flush=True)


def answer(process: subprocess.Popen) -> str:
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{process.args[-1]} ended with status {process.wait()}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vidax", metavar="PYTHON", help="the Python that has vidax; left out otherwise")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    pythons = {side: args.vidax if side == "vidax" else sys.executable for side in SIDES}
    running = {}
    for side, python in pythons.items():
        if python:
            command = [python, __file__, "--serve", side]
            running[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    times: dict[str, list[float]] = {side: [] for side in running}
    for process in running.values():
        answer(process)
    for _ in range(args.repeats):
        for side, process in running.items():
            print(file=process.stdin, flush=True)
            times[side].append(float(answer(process)))
    for process in running.values():
        process.stdin.close()
        process.wait()
    medians = {side: statistics.median(seconds) for side, seconds in times.items()}
    for side, seconds in medians.items():
        print(f"{side:16} {seconds * 1e3:8.0f} ms   theirs / ours {seconds / medians['ours']:5.2f}")


if __name__ == "__main__":
    main()
