"""Tiny Qwen3.5 models of transformers with harsh random weights, and their weights as values of our declaration."""

import torch
import transformers
from torch_values import by_rules, harshen

from shardzoo.convert.families.qwen3_5 import LAYOUTS, RULES, read_config
from shardzoo.zoo import qwen3_5

SIZES = dict(vocab_size=131, hidden_size=24, intermediate_size=37, max_position_embeddings=512, rms_norm_eps=1e-6)


def _rope(part, sections, theta=1e7):
    return {
        "rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part, "mrope_section": sections,
        "mrope_interleaved": True,
    }  # fmt: skip


CASES = {
    "published-pattern": dict(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False, head_dim=32,
        rope_parameters=_rope(0.25, [2, 1, 1]), linear_conv_kernel_dim=4, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=4, linear_num_value_heads=12,
    ),
    "two-super-blocks": dict(
        **{**SIZES, "rms_norm_eps": 1e-3}, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, tie_word_embeddings=True, rope_parameters=_rope(0.4, [1, 1, 0], 1e4),
        linear_conv_kernel_dim=4, linear_key_head_dim=11, linear_value_head_dim=11, linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
    "every-other": dict(
        **SIZES, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, head_dim=14,
        layer_types=["linear_attention", "full_attention"] * 2, tie_word_embeddings=False,
        rope_parameters=_rope(1.0, [3, 2, 2], 5e5), linear_conv_kernel_dim=3, linear_key_head_dim=9,
        linear_value_head_dim=5, linear_num_key_heads=1, linear_num_value_heads=4,
    ),
    "thirds": dict(
        **{**SIZES, "rms_norm_eps": 1e-3}, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        tie_word_embeddings=False, rope_parameters=_rope(0.5, [2, 0, 0]), linear_conv_kernel_dim=5,
        linear_key_head_dim=10, linear_value_head_dim=14, linear_num_key_heads=3, linear_num_value_heads=6,
    ),
}  # fmt: skip


def harsh(model):
    """Norms of the stream about 0 and those of heads about 1, as they are stored; decays over 3 to 100 tokens.

    A head that forgets at once reads q . k of one token alone, which is near 0 now and then, and the norm after it
    makes much of what is left: the reference itself then moves by 1e-4 where a weight moves by its last bit.
    """
    harshen(model, is_norm=lambda name, weight: name.endswith("linear_attn.norm.weight"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.randn_like(weight) - 3)


def build(name, seed=0, next=False):
    """The torch model in float32, or a Qwen3-Next of the same sizes, and our config as it is read from theirs."""
    torch.manual_seed(seed)
    if next:
        theirs = transformers.Qwen3NextConfig(**CASES[name], num_experts=0)
        model = transformers.Qwen3NextForCausalLM(theirs).eval()
    else:
        theirs = transformers.Qwen3_5TextConfig(**CASES[name])
        model = transformers.Qwen3_5ForCausalLM(theirs).eval()
    harsh(model)
    return model, read_config(theirs.to_dict(), {})


def values(named, config, name="transformers"):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return by_rules(named, qwen3_5.declare(config), LAYOUTS, name, RULES)
