"""Fine-tunes a converted decoder on the text of Python's own manual (`pydoc_data.topics`), on any mesh.

    python examples/smollm2.py smollm2-hf && shardzoo convert smollm2-hf smollm2
    python examples/finetune_decoder.py smollm2 runs/manual --steps 200 --mesh data=2,tensor=3 --fsdp

Weights and AdamW are in float32, the blocks compute in `--dtype`. Stopped at any moment and started again, also on
another mesh, the run goes on where its last finished save was. A text before and after, and the loss of rows that are
not trained on, show what was learned. The steps in the folder are checkpoints for `generate`, `export` and the rest.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import optax

from shardzoo import checkpoints
from shardzoo.cli.chat import read_text_assets
from shardzoo.cli.devices import start_mesh
from shardzoo.cli.options import parse_mesh
from shardzoo.zoo import decoder, layout, losses, optimizer_state, training
from shardzoo.zoo.generate import complete

PROMPT = "The with statement\n******************\n\nThe"
HELD_OUT = 8  # rows for the loss before and after


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="converted decoder with its tokenizer")
    parser.add_argument("folder", type=Path, help="of the run; one that is there is gone on with")
    parser.add_argument("--mesh", type=parse_mesh, default="one", help="e.g. data=2,tensor=3")
    parser.add_argument("--fsdp", action="store_true", help="split weights and optimizer over data too")
    parser.add_argument("--remat", default="dots", help="what a block keeps for the backward pass (zoo/remat.py)")
    parser.add_argument("--dtype", default="bfloat16", help="of the activations")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--save-every", type=int, default=100)
    return parser.parse_args()


def rows_of(text: str, encode, length: int) -> np.ndarray:
    """The text's tokens in rows of one length."""
    tokens = np.array(encode(text), np.int32)
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def batch_at(rows: np.ndarray, position: int, size: int) -> np.ndarray:
    """Examples `position`, `position + 1` ... of an endless stream: every epoch has all rows in an order of its own."""
    epoch, place = np.divmod(np.arange(position, position + size), len(rows))
    orders = {e: np.random.default_rng(e).permutation(len(rows)) for e in set(epoch.tolist())}
    return rows[[orders[e][i] for e, i in zip(epoch.tolist(), place, strict=True)]]


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    """Gradients clipped by their norm over the whole model, AdamW that decays the weights of linear layers."""
    schedule = optax.warmup_cosine_decay_schedule(rate / 10, rate, max(1, steps // 10), steps, rate / 10)

    def matrices(model):
        return jax.tree.map(lambda w: w.ndim > 2, model)  # stacked norms have two dims, and so has the embedding

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01, mask=matrices))


def main() -> None:
    args = arguments()
    source = checkpoints.open(args.checkpoint)
    declared = decoder.declare(source.config, np.float32)
    degrees = layout.with_kv(declared, args.mesh)
    mesh = start_mesh(degrees)
    declared = layout.split_at_rest(declared, "data", degrees) if args.fsdp else declared
    text = read_text_assets(source.assets, str(args.checkpoint))
    rows = rows_of("\n\n".join(topics.values()), text.encode, args.length)
    held_out, rows = rows[-HELD_OUT:], rows[:-HELD_OUT]

    forward = decoder.forward(declared, mesh, dtype=args.dtype, remat=args.remat)

    def loss(model, tokens):
        return losses.cross_entropy(forward(model, tokens), *losses.next_tokens(tokens))

    optimizer = adamw(args.rate, args.steps)
    step = training.make_step(loss, optimizer, declared, mesh)
    evaluate = jax.jit(loss)

    def show(model, when: str) -> None:
        (new,) = complete(declared, mesh, model, [text.encode(PROMPT)], max_new_tokens=40, dtype=args.dtype)
        print(f"{when}: held-out loss {evaluate(model, held_out):.4f}; {text.decode(new)!r}", flush=True)

    keep = {"every": args.save_every, "keep": 2, "source": source}
    with checkpoints.Training(args.folder, declared, optimizer, mesh, **keep) as run:
        state = run.restore()
        if state is None:
            model = checkpoints.restore(source, mesh, declared=declared, dtype=np.float32)
            opt_state = optimizer_state.init(optimizer, model, declared, mesh)
            state = checkpoints.TrainingState(
                model=model, opt_state=opt_state, step=np.int32(0), key=jax.random.key(0), data=0
            )
        at = int(state.step)
        show(state.model, f"step {at}")
        begin, told = time.monotonic(), []
        while at < args.steps and not run.stopping:
            tokens = batch_at(rows, state.data, args.batch)
            model, opt_state, metrics = step(state.model, state.opt_state, tokens)
            at += 1
            state = checkpoints.TrainingState(
                model=model, opt_state=opt_state, step=np.int32(at), key=state.key, data=state.data + args.batch
            )
            told.append(metrics)
            run.save(state, step=at, metrics=metrics._asdict(), force=at == args.steps)
            if at % 10 == 0 or at == args.steps:
                values = np.mean([np.array(jax.device_get(m)) for m in told], axis=0)
                each = (time.monotonic() - begin) / len(told)
                print(f"step {at}: loss {values[0]:.4f}, gradient {values[1]:.2f}, {each:.2f} s a step", flush=True)
                begin, told = time.monotonic(), []
        show(state.model, f"step {at}")


if __name__ == "__main__":
    main()
