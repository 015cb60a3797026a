"""Tiny image autoencoders of diffusers with harsh random weights, and their weights as values of our declaration."""

import functools

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2

from shardzoo.convert.families.image_vae import LAYOUTS, read_config
from shardzoo.convert.rules import expand
from shardzoo.zoo import image_vae, layout


def sizes(widths, **more):
    levels = len(widths)
    return dict(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, block_out_channels=widths, **more,
    )  # fmt: skip


FLUX1 = sizes(
    (16, 32, 32, 32), layers_per_block=2, norm_num_groups=8, latent_channels=4, scaling_factor=0.3611,
    shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False, sample_size=64,
)  # fmt: skip
FLUX2 = sizes((16, 32, 32, 32), layers_per_block=2, norm_num_groups=8, latent_channels=4, sample_size=64)
# name -> class, what its config has
CASES = {
    "flux1": (AutoencoderKL, FLUX1),
    "flux2": (AutoencoderKLFlux2, FLUX2),
    "two levels": (
        AutoencoderKL,
        sizes(
            (6, 9), layers_per_block=1, norm_num_groups=3, latent_channels=3, scaling_factor=2.5, shift_factor=-0.3,
            use_post_quant_conv=False,
        ),
    ),
    "two levels, statistics": (
        AutoencoderKLFlux2,
        sizes((6, 9), layers_per_block=1, norm_num_groups=3, latent_channels=3, batch_norm_eps=0.3),
    ),
    "three levels, narrow decoder": (
        AutoencoderKLFlux2,
        sizes(
            (8, 12, 20), layers_per_block=3, norm_num_groups=2, latent_channels=5, use_quant_conv=False,
            decoder_block_out_channels=(4, 6, 10),
        ),
    ),
    "one level, no attention": (
        AutoencoderKL,
        sizes((10,), layers_per_block=2, norm_num_groups=5, latent_channels=2, mid_block_add_attention=False),
    ),
}  # fmt: skip


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, its config as saved, and our config."""
    torch.manual_seed(seed)
    cls, fields = CASES[name]
    model = cls(**fields).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
            else:
                weight.copy_(0.5 * torch.randn_like(weight) + ("norm" in path and path.endswith("weight")))
        for path, value in model.named_buffers():
            if path.endswith("running_mean"):
                value.copy_(torch.randn_like(value))
            elif path.endswith("running_var"):
                value.copy_(torch.rand_like(value) + 0.2)
            else:
                value.fill_(12345678901)
    saved = {"_class_name": cls.__name__, **model.config}
    return model, saved, read_config(saved, {})


@functools.cache
def pieces(config):
    return expand(LAYOUTS[0].rules, layout.named(image_vae.declare(config)), {})


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {path: np.full(p.shape, np.nan, np.float32) for path, p in layout.named(image_vae.declare(config)).items()}
    for piece in pieces(config):
        at = tuple(slice(*r) for r in piece.at)
        found[piece.target][at] = named[piece.source].reshape(found[piece.target][at].shape)
    return found


def arrays(model, grads=False):
    """Torch name -> array of each parameter and statistic, or of its gradient (zero where nothing reads it)."""

    def one(p):
        value = (torch.zeros_like(p) if p.grad is None else p.grad) if grads else p.detach()
        return value.float().numpy()

    return {name: one(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
