"""Tiny Wan models of diffusers with harsh random weights, and their weights as values of our declaration."""

import functools

import numpy as np
import torch
from diffusers import WanTransformer3DModel

from shardzoo.convert.families.wan import LAYOUTS, read_config
from shardzoo.convert.rules import expand
from shardzoo.zoo import layout, wan

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
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            elif "table" in name or weight.ndim == 1:
                weight.copy_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
    saved = dict(model.config)
    return model, saved, read_config({"_class_name": "WanTransformer3DModel", **saved}, {})


@functools.cache
def pieces(config, name="diffusers"):
    rules = next(x.rules for x in LAYOUTS if x.name == name)
    return expand(rules, layout.named(wan.declare(config)), {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {path: np.zeros(p.shape, np.float32) for path, p in layout.named(wan.declare(config)).items()}
    for piece in pieces(config):
        at = tuple(slice(*r) for r in piece.at)
        found[piece.target][at] = named[piece.source].reshape(found[piece.target][at].shape)
    return found


def arrays(model, grads=False):
    """Torch name -> array of each parameter, or of its gradient (zero where nothing reads it)."""

    def one(p):
        value = (torch.zeros_like(p) if p.grad is None else p.grad) if grads else p.detach()
        return value.float().numpy()

    return {name: one(p) for name, p in model.named_parameters()}
