"""Tiny transformers models with harsh random weights, and their weights as values of our declaration."""

import numpy as np
import torch
import transformers

from shardzoo.zoo import decoder
from shardzoo.zoo.rope import Rope

SIZES = dict(
    vocab_size=131,
    hidden_size=24,
    intermediate_size=37,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
OURS = dict(vocab=131, embed=24, mlp=37, layers=4, heads=6, kv_heads=2, norm_eps=1e-5, max_positions=512)


def _plain(theta):
    return {"rope_type": "default", "rope_theta": theta}


# name -> (model class, config class, what its config adds, our config)
CASES = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **SIZES, head_dim=10, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        ),
        decoder.Config(
            **OURS, head_dim=10, qkv_bias=True, out_bias=True, mlp_bias=True,
            rope=Rope(scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64),
        ),
    ),
    "llama-linear": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **SIZES, head_dim=10, tie_word_embeddings=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        ),
        decoder.Config(**OURS, head_dim=10, tied=True, rope=Rope(theta=500.0, scaling="linear", factor=4.0)),
    ),
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(
            **SIZES, head_dim=8, sliding_window=5, rope_parameters=_plain(1e4), tie_word_embeddings=False
        ),
        decoder.Config(**OURS, head_dim=8, sliding_window=5),
    ),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(
            **{**SIZES, "hidden_size": 48}, rope_parameters=_plain(1e6), tie_word_embeddings=True,
            use_sliding_window=True, sliding_window=4, max_window_layers=2,
        ),
        decoder.Config(
            **{**OURS, "embed": 48}, head_dim=8, rope=Rope(theta=1e6), qkv_bias=True, tied=True, sliding_window=4,
            sliding_layers=(False, False, True, True),
        ),
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**SIZES, head_dim=14, rope_parameters=_plain(1e6), tie_word_embeddings=False),
        decoder.Config(**OURS, head_dim=14, rope=Rope(theta=1e6), qk_norm=True),
    ),
}  # fmt: skip


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, and our config."""
    cls, torch_config, config = CASES[name]
    torch.manual_seed(seed)
    model = cls(torch_config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path:
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (0.5 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
    return model, config


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    c, heads, kv = config, (config.heads, config.head_dim), (config.kv_heads, config.head_dim)

    def each(name, *shape):
        return np.stack([named[f"model.layers.{i}.{name}"].reshape(shape or (-1,)) for i in range(c.layers)])

    def pair(first, second, *shape):
        return np.stack([each(first, *shape), each(second, *shape)], axis=1)

    attn, mlp = "self_attn", "mlp"
    found = {
        "embed.weight": named["model.embed_tokens.weight"],
        "norm.weight": named["model.norm.weight"],
        "blocks.attn_norm.weight": each("input_layernorm.weight"),
        "blocks.mlp_norm.weight": each("post_attention_layernorm.weight"),
        "blocks.attn.q.weight": each(f"{attn}.q_proj.weight", *heads, c.embed),
        "blocks.attn.kv.weight": pair(f"{attn}.k_proj.weight", f"{attn}.v_proj.weight", *kv, c.embed),
        "blocks.attn.out.weight": each(f"{attn}.o_proj.weight", c.embed, *heads),
        "blocks.mlp.gate_up.weight": pair(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", c.mlp, c.embed),
        "blocks.mlp.down.weight": each(f"{mlp}.down_proj.weight", c.embed, c.mlp),
    }
    if c.qkv_bias:
        found["blocks.attn.q.bias"] = each(f"{attn}.q_proj.bias", *heads)
        found["blocks.attn.kv.bias"] = pair(f"{attn}.k_proj.bias", f"{attn}.v_proj.bias", *kv)
    if c.out_bias:
        found["blocks.attn.out.bias"] = each(f"{attn}.o_proj.bias")
    if c.mlp_bias:
        found["blocks.mlp.gate_up.bias"] = pair(f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias", c.mlp)
        found["blocks.mlp.down.bias"] = each(f"{mlp}.down_proj.bias")
    if c.qk_norm:
        found["blocks.attn.q_norm.weight"] = each(f"{attn}.q_norm.weight")
        found["blocks.attn.k_norm.weight"] = each(f"{attn}.k_norm.weight")
    if not c.tied:
        found["head.weight"] = named["lm_head.weight"]
    return found
