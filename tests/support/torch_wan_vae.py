"""Tiny Wan autoencoders of diffusers with harsh random weights, and their weights as values of our declaration."""

import functools

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from shardzoo.convert.families.wan_vae import LAYOUTS, read_config
from shardzoo.convert.rules import expand
from shardzoo.zoo import layout, wan_vae

WAN21 = dict(
    base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True], dropout=0.0, latents_mean=[0.1, -0.2, 0.3, -0.4],
    latents_std=[1.0, 2.0, 0.5, 1.5],
)  # fmt: skip
WAN22 = dict(
    base_dim=8, decoder_base_dim=12, z_dim=6, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True], dropout=0.0, is_residual=True, in_channels=12, out_channels=12,
    patch_size=2, scale_factor_temporal=4, scale_factor_spatial=16, latents_mean=[0.3, -0.2, 0.0, 1.0, 0.5, -1.0],
    latents_std=[1.0, 0.5, 2.0, 1.3, 0.7, 1.0],
)  # fmt: skip
# name -> class, what its config has
CASES = {
    "2.1": (AutoencoderKLWan, WAN21),
    "2.2": (AutoencoderKLWan, WAN22),
    "qwen-image": (AutoencoderKLQwenImage, WAN21),
    "qwen-image, four channels": (AutoencoderKLQwenImage, {**WAN21, "input_channels": 4}),
    "2.1, narrow": (
        AutoencoderKLWan,
        {**WAN21, "base_dim": 6, "decoder_base_dim": 10, "num_res_blocks": 1, "dim_mult": [2, 3, 3]}
        | {"temperal_downsample": [True, False]},
    ),
    "2.1, two levels": (
        AutoencoderKLWan,
        {**WAN21, "base_dim": 6, "num_res_blocks": 1, "dim_mult": [2, 3], "temperal_downsample": [True]},
    ),
    "2.1, one level": (AutoencoderKLWan, {**WAN21, "dim_mult": [2], "temperal_downsample": []}),
    "2.2, no patches": (
        AutoencoderKLWan,
        {**WAN22, "in_channels": 3, "out_channels": 3, "patch_size": None, "scale_factor_spatial": 4}
        | {"num_res_blocks": 1, "dim_mult": [1, 2, 2], "temperal_downsample": [True, True]},
    ),
}


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    cls, fields = CASES[name]
    model = cls(**fields).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("gamma"):
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            elif weight.ndim == 1:
                weight.copy_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
    saved = {"_class_name": cls.__name__, **model.config}
    return model, saved, read_config(saved, {})


@functools.cache
def pieces(config):
    more = "" if config.blocks == 2 else f", blocks of {config.blocks}"
    rules = next(x.rules for x in LAYOUTS if x.name == f"diffusers{more}")
    return expand(rules, layout.named(wan_vae.declare(config)), {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {path: np.full(p.shape, np.nan, np.float32) for path, p in layout.named(wan_vae.declare(config)).items()}
    for piece in pieces(config):
        at = tuple(slice(*r) for r in piece.at)
        found[piece.target][at] = named[piece.source].reshape(found[piece.target][at].shape)
    return found
