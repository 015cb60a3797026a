"""Tiny CLIP text encoders of transformers with harsh random weights, and these as values of our declaration."""

import numpy as np
import torch
import transformers
from torch_clip import blocks, harsh

from shardzoo.zoo.clip_text import Config

# name -> (what the config of transformers says, our config)
CASES = {
    "published tiny": (
        dict(
            vocab_size=120, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=20, hidden_act="quick_gelu", projection_dim=32, bos_token_id=118, eos_token_id=119,
            pad_token_id=119,
        ),
        Config(vocab=120, embed=32, mlp=64, layers=2, heads=4, positions=20, end_token=119),
    ),
    "ends at the highest id": (
        dict(
            vocab_size=50, hidden_size=24, intermediate_size=37, num_hidden_layers=3, num_attention_heads=3,
            max_position_embeddings=77, hidden_act="quick_gelu", bos_token_id=0, eos_token_id=2, pad_token_id=1,
            layer_norm_eps=1e-3,
        ),
        Config(vocab=50, embed=24, mlp=37, layers=3, heads=3, positions=77, norm_eps=1e-3),
    ),
    "tokens after the end token": (
        dict(
            vocab_size=65, hidden_size=40, intermediate_size=20, num_hidden_layers=4, num_attention_heads=5,
            max_position_embeddings=9, hidden_act="gelu", bos_token_id=5, eos_token_id=7, pad_token_id=64,
        ),
        Config(vocab=65, embed=40, mlp=20, layers=4, heads=5, positions=9, activation="gelu", end_token=7),
    ),
    "one block, one head": (
        dict(
            vocab_size=30, hidden_size=20, intermediate_size=20, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=6, hidden_act="gelu", bos_token_id=3, eos_token_id=29, pad_token_id=0,
        ),
        Config(vocab=30, embed=20, mlp=20, layers=1, heads=1, positions=6, activation="gelu", end_token=29),
    ),
}  # fmt: skip


def build(name, seed=0):
    """The torch model in float32 with no weight at a trivial value, and our config."""
    sizes, config = CASES[name]
    torch.manual_seed(seed)
    return harsh(transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes)).eval()), config


def values(named, config):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients)."""
    return {
        "embed.weight": named["embeddings.token_embedding.weight"],
        "positions": named["embeddings.position_embedding.weight"],
        "norm.weight": named["final_layer_norm.weight"],
        "norm.bias": named["final_layer_norm.bias"],
    } | blocks(named, config)


def texts(config, batch, seq, seed=5):
    """Random ids with an end in each row but the last, at different places, and what follows it as random."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab, (batch, seq))
    end = config.vocab - 1 if config.end_token is None else config.end_token
    ids[ids == end] = 0
    for row in range(batch - 1):
        ids[row, (3 * row + 2) % seq] = end
    return ids.astype(np.int32)
