"""A step of training on a CPU, side by side with transformers on PyTorch; and weights split over data against whole.

    python benchmarks/training_cpu.py [torch] [fsdp] [--preset smollm2-135m] [--dtype float32 bfloat16]

A step is forward, next-token loss, backward, clipping by the global norm, AdamW, with the same sizes, batch and cores.
Weights and moments are in float32 on both sides; bfloat16 is `dtype="bfloat16"` here and autocast there, whose AdamW is
PyTorch's fused one. Each side is a process of its own; their runs alternate. The figures are medians, and the ratio is
ours / theirs (below 1: we are faster).

Both sides run with GLIBC_TUNABLES as in `KEEP` unless it is set to something else ("" for none): the arrays of a step
come and go, one of a gigabyte or two on our side, and memory that is given back and asked for anew at each step costs
up to half a step of system time, on one core whatever the number of them. Our side keeps the results of products for
the backward pass (`--remat dots`), which halves that memory.

`fsdp` compares the same step of fewer layers on 8 CPU devices along `data`: weights and optimizer state split over
them, against whole.
"""

import argparse
import dataclasses
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from side_by_side import medians, serve

RATE, DECAY, CLIP = 1e-4, 0.01, 1.0
# Freed memory stays with the process, in one arena, so that the next step finds it; and it comes in large pages.
KEEP = ("hugetlb=1", "mmap_max=0", "trim_threshold=17179869184", "arena_max=1")
FSDP_LAYERS = 4  # whole weights, moments and gradients lie in the memory of one machine eight times


def ours(args: argparse.Namespace):
    import jax
    import optax

    from shardzoo import zoo
    from shardzoo.zoo import decoder, layout, losses, optimizer_state, training

    config = config_of(args)
    degrees = zoo.Degrees(data=args.data)
    declared, mesh = decoder.declare(config), zoo.make_mesh(data=args.data)
    declared = layout.split_at_rest(declared, "data", degrees) if args.split else declared
    forward = decoder.forward(declared, mesh, dtype=args.dtype[0], remat=False if args.remat == "none" else args.remat)

    def loss(model, tokens):
        return losses.cross_entropy(forward(model, tokens), *losses.next_tokens(tokens))

    def drawn(key):
        keys = iter(jax.random.split(key, len(jax.tree.leaves(declared))))
        return jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape) * 0.02, declared)

    lie = jax.tree.map(lambda p: p.sharding(mesh), declared)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))
    step = training.make_step(loss, optimizer, declared, mesh)
    model = jax.jit(drawn, out_shardings=lie)(jax.random.key(0))
    state = [model, optimizer_state.init(optimizer, model, declared, mesh)]
    del model
    tokens = batch(config, args)

    def call():
        *state[:], metrics = step(*state, tokens)
        return float(metrics.loss)

    return call


def theirs(args: argparse.Namespace):
    import torch
    import transformers

    config = config_of(args)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes = transformers.LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.embed, intermediate_size=config.mlp,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied,
        max_position_embeddings=config.max_positions, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    ids = torch.tensor(batch(config, args))

    def call():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype[0] == "bfloat16"):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return call


def config_of(args: argparse.Namespace):
    from shardzoo import zoo

    _, config = zoo.find_preset(f"decoder/{args.preset}")
    return dataclasses.replace(config, layers=args.layers or config.layers)


def batch(config, args: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab, (args.batch, args.length))


def command(args: argparse.Namespace, side: str, dtype: str, data: int = 1) -> list[str]:
    """The program of one side."""
    given = {"preset": args.preset, "dtype": dtype, "batch": args.batch, "length": args.length, "data": data}
    given |= {name: getattr(args, name) for name in ("remat", "layers") if getattr(args, name)}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, __file__, *words, "--side", side]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["torch", "fsdp"])
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, help="fewer than the preset has")
    parser.add_argument("--remat", default="dots", help="of our side, a name in zoo/remat.py, or none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["ours", "theirs", "whole", "split"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        args.split = args.side == "split"
        serve((theirs if args.side == "theirs" else ours)(args))
        return
    os.environ.setdefault("GLIBC_TUNABLES", ":".join(f"glibc.malloc.{option}" for option in KEEP))
    print(f"{args.preset}, {args.batch} x {args.length} tokens, {len(os.sched_getaffinity(0))} cores, seconds a step")
    for dtype in args.dtype if "torch" in args.what else ():
        compare(args, dtype, {side: command(args, side, dtype) for side in ("ours", "theirs")})
    if "fsdp" in args.what:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        args.batch, args.layers = max(8, args.batch), args.layers or FSDP_LAYERS
        print(f"8 devices along data, {args.batch} x {args.length} tokens, {args.layers} layers")
        sides = {"split over data": "split", "whole": "whole"}
        compare(args, "float32", {name: command(args, side, "float32", data=8) for name, side in sides.items()})


def compare(args: argparse.Namespace, dtype: str, commands: dict[str, list[str]]) -> None:
    found = medians(commands, args.repeats)
    a, b = found.values()
    print(
        f"{dtype:9} " + ", ".join(f"{side} {s:.2f} s" for side, s in found.items()) + f", ratio {a / b:.2f}", flush=True
    )


if __name__ == "__main__":
    main()
