"""A tiny config of every family, with heads and sizes that divide by most meshes, and sizes to trace them with."""

from shardzoo.zoo import (
    clip_text,
    clip_vision,
    decoder,
    flux,
    flux2,
    image_vae,
    qwen2_5_vl,
    qwen3_5,
    qwen3_5_vision,
    qwen_image,
    t5,
    wan,
    wan_vae,
)
from shardzoo.zoo.families import TraceSizes

# Lengths that divide: of others a mask is gathered in each block, which XLA moves out of the scan.
SIZES = TraceSizes(batch=2, tokens=24, frames=5, height=64, width=64)
TINY = {
    "clip-text": clip_text.Config(vocab=64, embed=48, mlp=40, layers=3, heads=8, positions=24),
    "clip-vision": clip_vision.Config(embed=48, mlp=40, layers=3, heads=8, image=21, patch=7),
    "flux2": flux2.Config(
        in_channels=6, out_channels=6, heads=8, head_dim=12, double_layers=2, single_layers=2, mlp=40, text=10, freq=14,
        axes=(2, 4, 4, 2),
    ),
    "image-vae": image_vae.Config(latent_channels=3, widths=(4, 6), decoder_widths=(4, 6), blocks=1, groups=2),
    "qwen-image": qwen_image.Config(
        in_channels=8, out_channels=8, heads=8, head_dim=12, layers=2, mlp=48, text=10, axes=(2, 4, 6)
    ),
    "qwen2.5-vl-vision": qwen2_5_vl.Config(
        embed=32, mlp=24, layers=3, heads=4, channels=2, patch=4, window=16, whole=(1,), out=16
    ),
    "qwen3-5": qwen3_5.Config(
        vocab=48, embed=32, layers=4, interval=4, mlp=48, heads=8, kv_heads=4, head_dim=10, rotary_dim=6,
        sections=(1, 1, 1), key_heads=8, value_heads=16, key_dim=10, value_dim=8, max_positions=64,
    ),
    "qwen3-5-vision": qwen3_5_vision.Config(
        embed=32, mlp=24, layers=2, heads=4, channels=2, patch=4, out=32, positions=16
    ),
    "t5": t5.Config(vocab=48, embed=32, layers=2, heads=8, head_dim=6, mlp=48, buckets=8, max_distance=11),
    "wan": wan.Config(in_channels=4, out_channels=4, heads=8, head_dim=8, layers=2, mlp=48, text=12, freq=16),
    "wan-vae": wan_vae.Config(
        latent_channels=3, width=4, decoder_width=4, multipliers=(1, 2), blocks=1, halve_time=(True,),
        latent_mean=(0.1, 0.2, -0.3), latent_std=(1.0, 2.0, 0.5),
    ),
    "decoder": decoder.Config(vocab=64, embed=32, layers=3, heads=8, kv_heads=4, head_dim=8, mlp=64),
    "flux": flux.Config(
        in_channels=16, out_channels=16, heads=8, head_dim=16, double_layers=2, single_layers=3, mlp=64, text=32,
        pooled=24, guidance=True, axes=(4, 6, 6),
    ),
}  # fmt: skip
