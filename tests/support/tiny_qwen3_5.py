"""A small Qwen3.5 and harsh weights for it, without PyTorch."""

import numpy as np
from mesh_parity import harsh

from shardzoo.zoo import layout
from shardzoo.zoo.qwen3_5 import Config

CONFIG = Config(
    vocab=48, embed=32, layers=3, interval=3, mlp=48, heads=8, kv_heads=4, head_dim=10, rotary_dim=6,
    sections=(1, 1, 1), key_heads=8, value_heads=16, key_dim=10, value_dim=8, norm_eps=1e-3, max_positions=64,
)  # fmt: skip


def weights(declared):
    """Harsh ones, with norms stored about 0 where the model adds 1 to them, and decays over more than a few tokens.

    A head that forgets at once reads q . k of one token alone, which is near 0 now and then, and the norm after it
    makes much of what is left: the last bits of one device's result would mean nothing.
    """
    values = layout.named(harsh(declared))
    shift = {k: 1.0 for k in values if "norm" in k and "mixer.norm" not in k} | {"delta.mixer.a_log": 3.0}
    return layout.fill(declared, {k: v - np.float32(shift.get(k, 0.0)) for k, v in values.items()})
