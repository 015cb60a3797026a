"""Tiny Qwen-Image models of diffusers with harsh random weights, and their weights as values of our declaration."""

import torch
from diffusers import QwenImageTransformer2DModel
from torch_values import by_rules, harshen

from shardzoo.convert.families.qwen_image import FAMILY, read_config
from shardzoo.zoo import qwen_image

SIZES = dict(
    patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=32, guidance_embeds=False, axes_dims_rope=(4, 6, 6), zero_cond_t=False,
    use_additional_t_cond=False, use_layer3d_rope=False,
)  # fmt: skip


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel(**{**SIZES, **changes}).eval()
    harshen(model, is_norm=lambda name, weight: weight.ndim == 1 and "norm" in name and "linear" not in name)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "QwenImageTransformer2DModel", **saved}, {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return by_rules(named, qwen_image.declare(config), FAMILY.layouts, rules=FAMILY.rules)
