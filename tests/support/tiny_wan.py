"""Tiny Wan pipelines of every kind with random weights, saved by diffusers or as the Wan repositories have them.

Weights are harsh: no bias is zero, no norm is one, no table is small.
"""

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import safetensors.torch
import torch
import transformers
from diffusers.pipelines.wan import pipeline_wan_i2v

from shardzoo.zoo import wan_vae

# The image pipeline calls ftfy without asking whether it is there; on plain English it changes nothing.
pipeline_wan_i2v.ftfy = types.SimpleNamespace(fix_text=lambda text: text)

SENTENCE = "a red fox jumps over the lazy dog in snow while it rains and nobody looks blurry"
TEXT = 32
TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT,
    "freq_dim": 16,
    "ffn_dim": 56,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
IMAGE = {"image_dim": 24, "added_kv_proj_dim": 48}
# Latent channels are as many as published: the original's files say nothing of their statistics.
VAE = {"base_dim": 8, "z_dim": 16}
SMALL_VAE = {**VAE, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False]}
NEWER = wan_vae.PRESETS["wan2.2-vae"]
VAE_22 = {
    "base_dim": 8,
    "z_dim": 48,
    "latents_mean": list(NEWER.latent_mean),
    "latents_std": list(NEWER.latent_std),
    "decoder_base_dim": 12,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
CLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "hidden_act": "gelu",
}
T5 = {
    "vocab_size": 64,
    "d_model": TEXT,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
# kind: (what differs in the transformer, VAE, CLIP or not, experts, options of the pipeline)
KINDS: Mapping[str, tuple[dict, dict, bool, int, dict]] = {
    "small": ({}, SMALL_VAE, False, 1, {}),  # of few tensors: quickly converted, and of no other use
    "t2v": ({}, VAE, False, 1, {}),
    "i2v": ({"in_channels": 36, **IMAGE}, VAE, True, 1, {}),
    "flf2v": ({"in_channels": 36, **IMAGE, "pos_embed_seq_len": 10}, VAE, True, 1, {}),
    "t2v-a14b": ({}, VAE, False, 2, {"boundary_ratio": 0.875}),
    "i2v-a14b": ({"in_channels": 36}, VAE, False, 2, {"boundary_ratio": 0.9}),
    "ti2v": ({"in_channels": 48, "out_channels": 48}, VAE_22, False, 1, {"expand_timesteps": True}),
}


def harsh(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The module with weights that hide nothing: biases, norms and tables as large as matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2 or "gamma" in name:
                parameter.copy_(parameter + 0.2 * noise)
            elif "table" in name or "embed" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return module.eval()


def tokenizer() -> transformers.PreTrainedTokenizerBase:
    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in SENTENCE.split()), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    return transformers.T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0)


def components(kind: str) -> dict[str, Any]:
    """What the pipeline of a kind is made of."""
    more, vae, clip, experts, _ = KINDS[kind]
    models = [diffusers.WanTransformer3DModel(**{**TRANSFORMER, **more}) for _ in range(experts)]
    made = {
        "tokenizer": tokenizer(),
        "text_encoder": harsh(transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)), 1),
        "vae": harsh(diffusers.AutoencoderKLWan(**vae), 2),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "transformer": harsh(models[0], 3),
        "transformer_2": harsh(models[1], 4) if experts > 1 else None,
    }
    if kind in ("i2v", "flf2v", "i2v-a14b"):
        config = transformers.CLIPVisionConfig(**CLIP)
        made["image_encoder"] = harsh(transformers.CLIPVisionModel(config), 5) if clip else None
        side = CLIP["image_size"]
        processor = transformers.CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        made["image_processor"] = processor if clip else None
    return made


def pipeline(kind: str) -> diffusers.DiffusionPipeline:
    """The pipeline of diffusers; "ti2v" as text to video."""
    made = components(kind)
    cls = diffusers.WanImageToVideoPipeline if "image_encoder" in made else diffusers.WanPipeline
    return cls(**made, **KINDS[kind][-1])


def as_image_to_video(made: diffusers.DiffusionPipeline) -> diffusers.DiffusionPipeline:
    """The same components in the pipeline that takes a first image ("ti2v")."""
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    parts = {name: getattr(made, name) for name in names}
    other = diffusers.WanImageToVideoPipeline(**parts, expand_timesteps=True)
    other.set_progress_bar_config(disable=True)
    return other


def save(kind: str, folder: Path) -> Path:
    """A diffusers folder."""
    pipeline(kind).save_pretrained(folder)
    return folder


EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
FILES = {
    "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth",
    "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
}


def save_original(saved: Path, exported: Mapping[str, Path], folder: Path) -> Path:
    """The folder of the Wan repositories, from components exported in the original layout; tokenizer from `saved`."""
    folder.mkdir(parents=True)
    two = "transformer_2" in exported
    for name, source in exported.items():
        if name.startswith("transformer"):
            to = folder / EXPERTS[name] if two else folder
            to.mkdir(exist_ok=True)
            for path in source.iterdir():
                (to / path.name).write_bytes(path.read_bytes())
            continue
        tensors = {k: v for f in source.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
        new = bool(json.loads((saved / "vae/config.json").read_text()).get("is_residual"))
        torch.save(tensors, folder / FILES.get(name, f"Wan2.{2 if new else 1}_VAE.pth"))
    (folder / "google/umt5-xxl").mkdir(parents=True)
    for path in (saved / "tokenizer").iterdir():
        (folder / "google/umt5-xxl" / path.name).write_bytes(path.read_bytes())
    return folder
