"""Tiny FLUX.2 models of diffusers with harsh random weights, and their weights as values of our declaration."""

import functools

import numpy as np
import torch
from diffusers import Flux2Transformer2DModel

from shardzoo.convert.families.flux2 import LAYOUTS, read_config
from shardzoo.convert.rules import expand
from shardzoo.zoo import flux2, layout

SIZES = dict(
    patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=48, timestep_guidance_channels=32, mlp_ratio=3.0, axes_dims_rope=(4, 4, 4, 4), rope_theta=2000,
    eps=1e-6, guidance_embeds=True,
)  # fmt: skip


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = Flux2Transformer2DModel(**{**SIZES, **changes}).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # all of them norms
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "Flux2Transformer2DModel", **saved}, {})


@functools.cache
def pieces(config, name="diffusers"):
    rules = next(x.rules for x in LAYOUTS if x.name == name)
    return expand(rules, layout.named(flux2.declare(config)), {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {path: np.zeros(p.shape, np.float32) for path, p in layout.named(flux2.declare(config)).items()}
    for piece in pieces(config):
        at = tuple(slice(*r) for r in piece.at)
        taken = named[piece.source][tuple(slice(*r) for r in piece.take)]
        found[piece.target][at] = taken.reshape(found[piece.target][at].shape)
    return found
