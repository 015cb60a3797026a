"""Tiny CLIP image encoders of transformers with harsh random weights, and these as values of our declaration."""

import numpy as np
import torch
import transformers

from shardzoo.zoo.clip_vision import Config

# name -> (what the config of transformers says, our config)
CASES = {
    "published tiny": (
        dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=28,
            patch_size=14, hidden_act="gelu", projection_dim=24,
        ),
        Config(embed=32, mlp=64, layers=3, heads=4, image=28, patch=14),
    ),
    "quick gelu": (
        dict(
            hidden_size=40, intermediate_size=37, num_hidden_layers=4, num_attention_heads=4, image_size=24,
            patch_size=8, hidden_act="quick_gelu", layer_norm_eps=1e-3,
        ),
        Config(embed=40, mlp=37, layers=4, heads=4, image=24, patch=8, activation="quick_gelu", norm_eps=1e-3),
    ),
    "a rest at the border": (
        dict(
            hidden_size=24, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3, image_size=31,
            patch_size=7, hidden_act="gelu",
        ),
        Config(embed=24, mlp=50, layers=2, heads=3, image=31, patch=7),
    ),
    "one channel, one patch": (
        dict(
            hidden_size=20, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=10,
            patch_size=10, num_channels=1, hidden_act="gelu",
        ),
        Config(embed=20, mlp=20, layers=2, heads=2, image=10, patch=10, channels=1),
    ),
}  # fmt: skip


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, and our config."""
    sizes, config = CASES[name]
    torch.manual_seed(seed)
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes)).eval()
    return harsh(model), config


def harsh(model):
    """The model with weights none of which is at a trivial value."""
    with torch.no_grad():
        for path, weight in model.named_parameters():
            draw = torch.randn_like(weight)
            norm = "norm" in path or "layrnorm" in path
            scale = 0.5 if weight.ndim == 1 or "position" in path else weight[0].numel() ** -0.5
            weight.copy_(1 + 0.5 * draw if norm and path.endswith("weight") else scale * draw)
    return model


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    found = {
        "patches.weight": named["embeddings.patch_embedding.weight"],
        "patches.first": named["embeddings.class_embedding"],
        "patches.positions": named["embeddings.position_embedding.weight"],
    }
    for kind in ("weight", "bias"):
        found |= {
            f"patches.norm.{kind}": named[f"pre_layrnorm.{kind}"],
            f"norm.{kind}": named[f"post_layernorm.{kind}"],
        }
    return found | blocks(named, config)


def blocks(named, c):
    """Those of the blocks, which both encoders of a CLIP name alike."""
    heads = (c.heads, c.embed // c.heads)
    shapes = {"weight": (*heads, c.embed), "bias": heads}

    def each(name, *shape):
        return np.stack([named[f"encoder.layers.{i}.{name}"].reshape(shape or (-1,)) for i in range(c.layers)])

    found = {
        "blocks.attn.out.weight": each("self_attn.out_proj.weight", c.embed, *heads),
        "blocks.attn.out.bias": each("self_attn.out_proj.bias"),
        "blocks.mlp.up.weight": each("mlp.fc1.weight", c.mlp, c.embed),
        "blocks.mlp.up.bias": each("mlp.fc1.bias"),
        "blocks.mlp.down.weight": each("mlp.fc2.weight", c.embed, c.mlp),
        "blocks.mlp.down.bias": each("mlp.fc2.bias"),
    }
    for kind, shape in shapes.items():
        qkv = [each(f"self_attn.{n}_proj.{kind}", *shape) for n in "qkv"]
        found |= {
            f"blocks.attn_norm.{kind}": each(f"layer_norm1.{kind}"),
            f"blocks.mlp_norm.{kind}": each(f"layer_norm2.{kind}"),
            f"blocks.attn.qkv.{kind}": np.stack(qkv, axis=1),
        }
    return found
