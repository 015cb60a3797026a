"""Tiny Wan models of diffusers with harsh random weights, and their weights as values of our declaration."""

import torch
from diffusers import WanTransformer3DModel
from torch_values import by_rules, harshen

from shardzoo.convert.families.wan import LAYOUTS, read_config
from shardzoo.zoo import wan

SIZES = dict(
    patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32,
    freq_dim=32, ffn_dim=96, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
    rope_max_seq_len=64,
)  # fmt: skip
IMAGE = dict(in_channels=12, image_dim=20, added_kv_proj_dim=64)


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**{**SIZES, **changes}).eval()
    harshen(
        model,
        is_norm=lambda name, weight: "norm" in name and name.endswith("weight"),
        is_table=lambda name: "table" in name,
    )
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "WanTransformer3DModel", **saved}, {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return by_rules(named, wan.declare(config), LAYOUTS)
