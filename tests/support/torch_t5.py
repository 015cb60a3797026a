"""Tiny T5 encoders of transformers with harsh random weights, and their weights as values of our declaration."""

import numpy as np
import torch
import transformers

from shardzoo.zoo import t5

SIZES = dict(
    vocab_size=131, d_model=24, d_kv=10, d_ff=37, num_layers=3, num_heads=6, feed_forward_proj="gated-gelu",
    layer_norm_epsilon=1e-6, dropout_rate=0.0,
)  # fmt: skip
OURS = dict(vocab=131, embed=24, head_dim=10, mlp=37, layers=3, heads=6)
BUCKETS = dict(relative_attention_num_buckets=12, relative_attention_max_distance=9)
PUBLISHED = dict(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)  # of the tiny published cases
OURS_PUBLISHED = dict(vocab=128, embed=32, head_dim=8, mlp=64, layers=2, heads=4)

UMT5 = transformers.UMT5EncoderModel, transformers.UMT5Config
T5 = transformers.T5EncoderModel, transformers.T5Config
MT5 = transformers.MT5EncoderModel, transformers.MT5Config
# name -> (model class and config class, what its config says, our config)
CASES = {
    "umt5": (UMT5, SIZES | PUBLISHED, t5.Config(**OURS_PUBLISHED)),
    "t5": (T5, SIZES | PUBLISHED, t5.Config(**OURS_PUBLISHED, shared_bias=True)),
    "umt5, odd sizes": (UMT5, SIZES, t5.Config(**OURS)),
    "t5, odd sizes": (T5, SIZES, t5.Config(**OURS, shared_bias=True)),
    "umt5, few buckets": (UMT5, SIZES | BUCKETS, t5.Config(**OURS, buckets=12, max_distance=9)),
    "t5, few buckets": (T5, SIZES | BUCKETS, t5.Config(**OURS, buckets=12, max_distance=9, shared_bias=True)),
    "mt5": (MT5, SIZES | {"layer_norm_epsilon": 1e-3}, t5.Config(**OURS, shared_bias=True, norm_eps=1e-3)),
}


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, and our config."""
    (cls, config_cls), sizes, config = CASES[name]
    torch.manual_seed(seed)
    model = cls(config_cls(**sizes)).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path:
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (1 if "bias" in path else weight.shape[-1] ** -0.5))
    return model, config


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    c, heads = config, (config.heads, config.head_dim)
    attn, mlp = "layer.0.SelfAttention", "layer.1.DenseReluDense"

    def each(name, *shape):
        return np.stack([named[f"encoder.block.{i}.{name}"].reshape(shape or (-1,)) for i in range(c.layers)])

    found = {
        "embed.weight": named["shared.weight"],
        "norm.weight": named["encoder.final_layer_norm.weight"],
        "blocks.attn_norm.weight": each("layer.0.layer_norm.weight"),
        "blocks.mlp_norm.weight": each("layer.1.layer_norm.weight"),
        "blocks.attn.qkv.weight": np.stack([each(f"{attn}.{n}.weight", *heads, c.embed) for n in "qkv"], axis=1),
        "blocks.attn.out.weight": each(f"{attn}.o.weight", c.embed, *heads),
        "blocks.mlp.gate_up.weight": np.stack([each(f"{mlp}.wi_{i}.weight", c.mlp, c.embed) for i in (0, 1)], axis=1),
        "blocks.mlp.down.weight": each(f"{mlp}.wo.weight", c.embed, c.mlp),
    }
    table = f"{attn}.relative_attention_bias.weight"
    if c.shared_bias:
        return found | {"bias.weight": named[f"encoder.block.0.{table}"]}
    return found | {"blocks.bias.weight": each(table, c.buckets, c.heads)}
