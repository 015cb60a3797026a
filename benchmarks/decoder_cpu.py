"""Prefill and decode speed on a CPU, side by side with transformers on PyTorch.

    python benchmarks/decoder_cpu.py [--preset smollm2-135m] [--batch 1 8] [--dtype float32 bfloat16]

Both sides have the same random weights' sizes, the same prompts and all cores. Runs of the two sides alternate; the
figures are the medians of `--repeats` runs, and the ratio is ours / theirs (below 1: we are faster). Decode is the time
per step of a greedy generation, prefill's time taken off. PyTorch's side is `generate` with its default cache for
decode and one forward pass with a cache for prefill.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers

from shardzoo import zoo
from shardzoo.zoo.generate import generate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def ours(config, dtype, prompt, new):
    """Two functions: prefill (one new token) and the whole generation of `new` tokens."""
    declared, mesh = zoo.decoder.declare(config, dtype), zoo.make_mesh()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(declared))))
    model = jax.tree.map(lambda p: (jax.random.normal(next(keys), p.shape) * 0.02).astype(p.dtype), declared)
    run = generate(declared, mesh)
    lengths = np.full(len(prompt), prompt.shape[1], np.int32)

    def call(count):
        return lambda: jax.block_until_ready(run(model, prompt, lengths, max_new_tokens=count))

    return call(1), call(new)


def theirs(config, dtype, prompt, new):
    """The same with LlamaForCausalLM."""
    sizes = transformers.LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.embed, intermediate_size=config.mlp,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied,
        max_position_embeddings=config.max_positions, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(sizes).to(DTYPES[dtype]).eval()
    ids = torch.tensor(prompt)
    mask = torch.ones_like(ids)

    def prefill():
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)

    def whole():
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return prefill, whole


def seconds(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(sides, repeats):
    """Median prefill and whole seconds of each side, runs alternating, after one run of each."""
    for prefill, whole in sides:
        prefill(), whole()
    times = [([], []) for _ in sides]
    for _ in range(repeats):
        for (prefill, whole), (a, b) in zip(sides, times, strict=True):
            a.append(seconds(prefill))
            b.append(seconds(whole))
    return [(statistics.median(a), statistics.median(b)) for a, b in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    _, config = zoo.find_preset(f"decoder/{args.preset}")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    versions = f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{args.preset}: prompt {args.prompt}, {args.new} new tokens, {torch.get_num_threads()} threads; {versions}")
    print(f"{'dtype':9} {'batch':>5} {'':8} {'ours':>10} {'theirs':>10} {'ratio':>6}")
    for dtype in args.dtype:
        for batch in args.batch:
            prompt = np.random.default_rng(0).integers(0, config.vocab, (batch, args.prompt))
            sides = [side(config, dtype, prompt, args.new) for side in (ours, theirs)]
            (a, whole_a), (b, whole_b) = measure(sides, args.repeats)
            steps = args.new - 1
            rows = [("prefill", a, b), ("decode", (whole_a - a) / steps, (whole_b - b) / steps)]
            for name, x, y in rows:
                print(f"{dtype:9} {batch:5} {name:8} {x * 1e3:7.1f} ms {y * 1e3:7.1f} ms {x / y:6.2f}", flush=True)


if __name__ == "__main__":
    main()
