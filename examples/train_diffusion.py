"""Trains a small Wan transformer from random weights by flow matching on synthetic latents, on any mesh.

    python examples/train_diffusion.py runs/waves --steps 200 --mesh data=2,context=2 --fsdp

The latents are plane waves whose direction and speed the text states tell, so that a model which listens to them can
predict the velocity better than one that does not: the loss falls below the spread of the data. Weights and AdamW are
in float32, the blocks compute in `--dtype`. Started again, also on another mesh, the run goes on where it was.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardzoo import checkpoints
from shardzoo.cli.devices import start_mesh
from shardzoo.cli.options import parse_mesh
from shardzoo.zoo import layout, losses, optimizer_state, training, wan
from shardzoo.zoo.layout import LAYER
from shardzoo.zoo.sampling import TRAIN_STEPS

CONFIG = wan.Config(in_channels=4, out_channels=4, heads=4, head_dim=32, layers=4, mlp=256, text=16)
SHAPE = (4, 3, 8, 8)  # channels, frames, height, width of one row's latents
KINDS = 8  # of waves
TEXTS = np.random.default_rng(0).normal(size=(KINDS, 2, CONFIG.text)).astype(np.float32)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run; one that is there is gone on with")
    parser.add_argument("--mesh", type=parse_mesh, default="one", help="e.g. data=2,context=2")
    parser.add_argument("--fsdp", action="store_true", help="split weights and optimizer over data too")
    parser.add_argument("--remat", default="dots", help="what a block keeps for the backward pass (zoo/remat.py)")
    parser.add_argument("--dtype", default="bfloat16", help="of the activations")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--shift", type=float, default=3.0, help="of the noise levels towards noise")
    parser.add_argument("--save-every", type=int, default=100)
    return parser.parse_args()


def examples_at(position: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Latents and text states of examples `position`, `position + 1` ... of an endless stream."""
    frames, rows, columns = np.meshgrid(*map(np.arange, SHAPE[1:]), indexing="ij")
    latents, kinds = [], []
    for number in range(position, position + size):
        rng = np.random.default_rng(number)
        kind, phase = rng.integers(KINDS), rng.uniform(0, 2 * np.pi)
        angle, speed = kind * np.pi / KINDS, 0.5 + kind % 3
        wave = 0.8 * (np.cos(angle) * rows + np.sin(angle) * columns) - speed * frames + phase
        channels = [np.sqrt(2) * np.cos(wave + c * np.pi / 2) for c in range(SHAPE[0])]
        latents.append(np.stack(channels))
        kinds.append(kind)
    return np.stack(latents).astype(np.float32), TEXTS[kinds]


def random_weights(declared: Any, key: jax.Array) -> Any:
    """Weights with the spread of 1 / sqrt(inputs), norms of ones, biases of zeros."""
    paths = layout.named(declared)
    keys = jax.random.split(key, len(paths))

    def one(path: str, param: layout.Param, key: jax.Array) -> jax.Array:
        dims = [dim for dim in param.names if dim != LAYER]
        if path.endswith("bias"):
            return jnp.zeros(param.shape)
        if len(dims) == 1 or "norm" in path:
            return jnp.ones(param.shape)
        inputs = np.prod([param.size(dim) for dim in dims[1:]])
        return jax.random.normal(key, param.shape) / np.sqrt(inputs)

    return layout.fill(declared, {k: one(k, p, keys[i]) for i, (k, p) in enumerate(paths.items())})


def main() -> None:
    args = arguments()
    declared = wan.declare(CONFIG)
    mesh = start_mesh(args.mesh)
    declared = layout.split_at_rest(declared, "data", args.mesh, smallest=2**10) if args.fsdp else declared
    forward = wan.forward(declared, mesh, dtype=args.dtype, remat=args.remat)

    def loss(model, latents, text, key):
        noisy = losses.add_noise(latents, key, shift=args.shift)
        predicted = forward(model, noisy.sample, noisy.levels * TRAIN_STEPS, text=text)
        return losses.flow_matching(predicted, noisy.velocity)

    schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, max(1, args.steps // 10), args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    step = training.make_step(loss, optimizer, declared, mesh)
    with checkpoints.Training(args.folder, declared, optimizer, mesh, every=args.save_every, keep=2) as run:
        state = run.restore()
        if state is None:
            lie = jax.tree.map(lambda p: p.sharding(mesh), declared)
            model = jax.jit(lambda key: random_weights(declared, key), out_shardings=lie)(jax.random.key(0))
            opt_state = optimizer_state.init(optimizer, model, declared, mesh)
            key = jax.random.key(1)
            state = checkpoints.TrainingState(model=model, opt_state=opt_state, step=np.int32(0), key=key, data=0)
        at, begin, told = int(state.step), time.monotonic(), []
        while at < args.steps and not run.stopping:
            key = jax.random.fold_in(state.key, at)
            model, opt_state, metrics = step(state.model, state.opt_state, *examples_at(state.data, args.batch), key)
            at, data = at + 1, state.data + args.batch
            state = checkpoints.TrainingState(
                model=model, opt_state=opt_state, step=np.int32(at), key=state.key, data=data
            )
            told.append(metrics)
            run.save(state, step=at, metrics=metrics._asdict(), force=at == args.steps)
            if at % 10 == 0 or at == args.steps:
                values = np.mean([np.array(jax.device_get(m)) for m in told], axis=0)
                each = (time.monotonic() - begin) / len(told)
                print(f"step {at}: loss {values[0]:.4f}, gradient {values[1]:.2f}, {each:.2f} s a step", flush=True)
                begin, told = time.monotonic(), []


if __name__ == "__main__":
    main()
