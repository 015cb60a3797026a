"""Tiny FLUX.1 models of diffusers with harsh random weights, and their weights as values of our declaration."""

import functools

import numpy as np
import torch
from diffusers import FluxTransformer2DModel

from shardzoo.convert.families.flux import LAYOUTS, read_config
from shardzoo.convert.rules import expand
from shardzoo.zoo import flux, layout

SIZES = dict(
    patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=32, pooled_projection_dim=24, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
)  # fmt: skip


def build(seed=0, **changes):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**{**SIZES, **changes}).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm_" in name and weight.ndim == 1 and "linear" not in name:
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            elif weight.ndim == 1:
                weight.copy_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "FluxTransformer2DModel", **saved}, {})


@functools.cache
def pieces(config, name="diffusers"):
    rules = next(x.rules for x in LAYOUTS if x.name == name)
    return expand(rules, layout.named(flux.declare(config)), {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {path: np.zeros(p.shape, np.float32) for path, p in layout.named(flux.declare(config)).items()}
    for piece in pieces(config):
        at = tuple(slice(*r) for r in piece.at)
        taken = named[piece.source][tuple(slice(*r) for r in piece.take)]
        found[piece.target][at] = taken.reshape(found[piece.target][at].shape)
    return found


def arrays(model, grads=False):
    """Torch name -> array of each parameter, or of its gradient (zero where nothing reads it)."""

    def one(p):
        value = (torch.zeros_like(p) if p.grad is None else p.grad) if grads else p.detach()
        return value.float().numpy()

    return {name: one(p) for name, p in model.named_parameters()}
