"""Tiny FLUX.1 models of diffusers with harsh random weights, and their weights as values of our declaration."""

import torch
from diffusers import FluxTransformer2DModel
from torch_values import by_rules, harshen

from shardzoo.convert.families.flux import LAYOUTS, read_config
from shardzoo.zoo import flux

SIZES = dict(
    patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=32, pooled_projection_dim=24, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
)  # fmt: skip


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**{**SIZES, **changes}).eval()
    harshen(model, is_norm=lambda name, weight: "norm_" in name and weight.ndim == 1 and "linear" not in name)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "FluxTransformer2DModel", **saved}, {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return by_rules(named, flux.declare(config), LAYOUTS)
