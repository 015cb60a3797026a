"""Tiny FLUX.2 models of diffusers with harsh random weights, and their weights as values of our declaration."""

import torch
from diffusers import Flux2Transformer2DModel
from torch_values import by_rules, harshen

from shardzoo.convert.families.flux2 import LAYOUTS, read_config
from shardzoo.zoo import flux2

SIZES = dict(
    patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=48, timestep_guidance_channels=32, mlp_ratio=3.0, axes_dims_rope=(4, 4, 4, 4), rope_theta=2000,
    eps=1e-6, guidance_embeds=True,
)  # fmt: skip


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = Flux2Transformer2DModel(**{**SIZES, **changes}).eval()
    harshen(model)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "Flux2Transformer2DModel", **saved}, {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return by_rules(named, flux2.declare(config), LAYOUTS)
