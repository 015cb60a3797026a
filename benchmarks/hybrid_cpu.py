"""Qwen3.5 on a CPU: prefill and decode side by side with transformers, and the cost of DeltaNet by length.

    python benchmarks/hybrid_cpu.py speed [--prompt 512] [--dtype float32 bfloat16]
    python benchmarks/hybrid_cpu.py length [--tokens 1024 2048 4096 8192 16384]

`speed`: a model of 8 layers, 512 wide, with random weights. Runs of the two sides alternate; the figures are the
medians of `--repeats` runs, and the ratio is ours / theirs (below 1: we are faster). Decode is the time per step of a
greedy generation, prefill's time taken off. `length`: one DeltaNet layer of the same sizes, the least of `--repeats`
runs at each length, all lengths in turn; the time per token should not depend on it.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import P

from shardzoo import zoo
from shardzoo.zoo import layout, qwen3_5
from shardzoo.zoo.delta_net import DeltaNet

CONFIG = qwen3_5.Config(
    vocab=16384, embed=512, layers=8, mlp=1792, heads=6, kv_heads=2, head_dim=128, rotary_dim=32, sections=(6, 5, 5),
    key_heads=4, value_heads=12, key_dim=64, value_dim=64,
)  # fmt: skip


def random(declared):
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(declared))))
    return jax.tree.map(lambda p: (jax.random.normal(next(keys), p.shape) * 0.02).astype(p.dtype), declared)


def ours(dtype, prompt, new):
    """Two functions: prefill (one new token) and the whole generation of `new` tokens."""
    from shardzoo.zoo.qwen3_5_generate import generate

    declared = qwen3_5.declare(CONFIG, dtype)
    run, model = generate(declared, zoo.make_mesh()), random(declared)
    lengths = np.full(len(prompt), prompt.shape[1], np.int32)

    def call(count):
        return lambda: jax.block_until_ready(run(model, prompt, lengths, max_new_tokens=count))

    return call(1), call(new)


def theirs(dtype, prompt, new):
    """The same with Qwen3_5ForCausalLM."""
    import torch
    import transformers
    from decoder_cpu import DTYPES

    c = CONFIG
    rope = {
        "rope_type": "default", "rope_theta": c.rope.theta, "partial_rotary_factor": c.rotary_dim / c.head_dim,
        "mrope_section": list(c.sections),
    }  # fmt: skip
    sizes = transformers.Qwen3_5TextConfig(
        vocab_size=c.vocab, hidden_size=c.embed, intermediate_size=c.mlp, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rope_parameters=rope,
        linear_num_key_heads=c.key_heads, linear_num_value_heads=c.value_heads, linear_key_head_dim=c.key_dim,
        linear_value_head_dim=c.value_dim, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(sizes).to(DTYPES[dtype]).eval()
    ids = torch.tensor(prompt)
    mask = torch.ones_like(ids)

    def prefill():
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)

    def whole():
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return prefill, whole


def speed(args) -> None:
    import torch
    import transformers
    from decoder_cpu import measure

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    versions = f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"prompt {args.prompt}, {args.new} new tokens, {torch.get_num_threads()} threads; {versions}")
    print(f"{'dtype':9} {'batch':>5} {'':8} {'ours':>10} {'theirs':>10} {'ratio':>6}")
    for dtype in args.dtype:
        for batch in args.batch:
            prompt = np.random.default_rng(0).integers(0, CONFIG.vocab, (batch, args.prompt))
            (a, whole_a), (b, whole_b) = measure(
                [side(dtype, prompt, args.new) for side in (ours, theirs)], args.repeats
            )
            steps = args.new - 1
            for name, x, y in [("prefill", a, b), ("decode", (whole_a - a) / steps, (whole_b - b) / steps)]:
                print(f"{dtype:9} {batch:5} {name:8} {x * 1e3:7.1f} ms {y * 1e3:7.1f} ms {x / y:6.2f}", flush=True)


def length(args) -> None:
    from decoder_cpu import seconds

    declared, mesh = DeltaNet.declare(CONFIG.delta_sizes), zoo.make_mesh()
    model, split = random(declared), P("data", "context")
    layer = jax.jit(
        jax.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(layout.specs(declared), split), out_specs=split)
    )
    inputs = [jax.random.normal(jax.random.key(1), (1, tokens, CONFIG.embed)) for tokens in args.tokens]
    calls = [lambda x=x: jax.block_until_ready(layer(model, x)) for x in inputs]
    for call in calls:
        call()
    rounds = [[seconds(call) for call in calls] for _ in range(args.repeats)]
    least = [min(times) / tokens for times, tokens in zip(zip(*rounds, strict=True), args.tokens, strict=True)]
    for tokens, each in zip(args.tokens, least, strict=True):
        print(f"{tokens:6} tokens {each * 1e6:7.2f} us/token {each / least[0]:6.3f} of that at {args.tokens[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="speed", choices=["speed", "length"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=33)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    {"speed": speed, "length": length}[args.what](args)


if __name__ == "__main__":
    main()
