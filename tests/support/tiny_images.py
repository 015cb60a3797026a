"""Tiny pipelines of images of every kind with harsh random weights, as diffusers makes and saves them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import tiny_wan
import tokenizers
import torch
import transformers

WORDS = tiny_wan.SENTENCE.split()
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
IMAGE_TOKEN = "<|image_pad|>"
CHAT = (  # of klein: the template says whether it was told not to think
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}\n{% endif %}{% endif %}"
)
CHAT_OF_PARTS = (  # of dev
    "<|im_start|>{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[reply]{% endif %}"
)
T5 = {**tiny_wan.T5, "d_model": 32, "tie_word_embeddings": False}
CLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "hidden_act": "quick_gelu",
    "projection_dim": 24,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "in_channels": 16}
FLUX = {**HEADS, "num_single_layers": 2, "axes_dims_rope": (4, 6, 6), "pooled_projection_dim": 24}
FLUX2 = {**HEADS, "num_single_layers": 2, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32}
QWEN = {**HEADS, "out_channels": 4, "axes_dims_rope": (4, 6, 6)}
QWEN_VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False],
    "latents_mean": [0.1, -0.2, 0.3, -0.4],
    "latents_std": [1.0, 2.0, 0.5, 1.5],
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
DYNAMIC = {"use_dynamic_shifting": True, "shift": 3.0}
QWEN_SCHEDULE = {**DYNAMIC, "shift": 1.0, "shift_terminal": 0.02, "max_image_seq_len": 8192, "max_shift": 0.9}
# kind -> (class, scheduler, what differs in the transformer, options of the pipeline)
KINDS: Mapping[str, tuple[str, dict, dict, dict]] = {
    "flux-dev": ("FluxPipeline", DYNAMIC, {**FLUX, "guidance_embeds": True}, {}),
    "flux-schnell": ("FluxPipeline", {"shift": 1.0}, {**FLUX, "guidance_embeds": False}, {}),
    "flux2-dev": ("Flux2Pipeline", DYNAMIC, {**FLUX2, "guidance_embeds": True}, {}),
    "flux2-klein": ("Flux2KleinPipeline", DYNAMIC, {**FLUX2, "guidance_embeds": False}, {"is_distilled": True}),
    "flux2-klein-base": ("Flux2KleinPipeline", DYNAMIC, {**FLUX2, "guidance_embeds": False}, {"is_distilled": False}),
    "qwen-image": ("QwenImagePipeline", QWEN_SCHEDULE, QWEN, {}),
    "qwen-edit": ("QwenImageEditPipeline", QWEN_SCHEDULE, QWEN, {}),
    "qwen-edit-plus": ("QwenImageEditPlusPipeline", QWEN_SCHEDULE, {**QWEN, "zero_cond_t": True}, {}),
}


def clip_tokenizer() -> transformers.PreTrainedTokenizerBase:
    merges = [("t", "h"), ("th", "e</w>"), ("o", "x</w>"), ("d", "o")]
    pieces = [*LETTERS, *(letter + "</w>" for letter in LETTERS), *("".join(pair) for pair in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP["max_position_embeddings"])


def byte_tokenizer(chat: str | None = None, *, left: bool = False) -> transformers.PreTrainedTokenizerBase:
    merges = [("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("o", "x")]
    pieces = [*LETTERS, *("".join(pair) for pair in merges), "<|endoftext|>"]
    side = "left" if left else "right"
    made = transformers.Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, padding_side=side, chat_template=chat
    )
    more = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN]
    made.add_special_tokens({"additional_special_tokens": more})
    return made


def processor(tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.ProcessorMixin:
    """What makes tokens and patches of prompts and images, by Pillow."""
    images = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 3584 * 3584})
    return Processor(images, tokenizer)


class Processor(transformers.Qwen2VLProcessor):
    """Without a part for videos, which needs a package that is not there."""

    def __init__(self, image_processor=None, tokenizer=None):
        with mock.patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
            super().__init__(image_processor, tokenizer)


Processor.__name__, Processor.__module__ = "Qwen2VLProcessor", "transformers"  # as what it is saved


def text_model(kind: str, tokenizer: transformers.PreTrainedTokenizerBase) -> torch.nn.Module:
    """The language model of a kind, with a part that sees where the published one has it."""
    vocab = len(tokenizer)
    if kind.startswith("flux2-klein"):
        config = transformers.Qwen3Config(**TEXT, vocab_size=vocab, num_hidden_layers=28, tie_word_embeddings=True)
        return transformers.Qwen3ForCausalLM(config)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    if kind == "flux2-dev":
        text = {**TEXT, "vocab_size": vocab, "num_hidden_layers": 31, "model_type": "mistral", "sliding_window": None}
        sees = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 8}
        config = transformers.Mistral3Config(text_config=text, vision_config=sees, tie_word_embeddings=False)
        return transformers.Mistral3ForConditionalGeneration(config)
    text = {**TEXT, "vocab_size": vocab, "num_hidden_layers": 2, "model_type": "qwen2_5_vl_text"}
    text |= {"hidden_size": 64, "rope_parameters": {**rope, "mrope_section": [2, 1, 1]}, "use_sliding_window": False}
    text.pop("head_dim")
    sees = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    sees |= {"fullatt_block_indexes": [0], "window_size": 56}
    token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=sees, tie_word_embeddings=False, image_token_id=token
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def components(kind: str) -> dict[str, Any]:
    """What the pipeline of a kind is made of."""
    name, scheduler, transformer, _ = KINDS[kind]
    made: dict[str, Any] = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduler)}
    if name == "FluxPipeline":
        made["tokenizer"], made["tokenizer_2"] = clip_tokenizer(), tiny_wan.tokenizer()
        special = {f"{n}_token_id": getattr(made["tokenizer"], f"{n}_token_id") for n in ("bos", "eos", "pad")}
        clip = transformers.CLIPTextConfig(**CLIP, **special, vocab_size=len(made["tokenizer"]))
        made["text_encoder"] = transformers.CLIPTextModel(clip)
        made["text_encoder_2"] = transformers.T5EncoderModel(transformers.T5Config(**T5))
        made["transformer"] = diffusers.FluxTransformer2DModel(**transformer, joint_attention_dim=T5["d_model"])
        no_quant = {"use_quant_conv": False, "use_post_quant_conv": False}
        made["vae"] = diffusers.AutoencoderKL(**VAE, **no_quant, scaling_factor=0.3611, shift_factor=0.1159)
    else:
        chat = {"Flux2Pipeline": CHAT_OF_PARTS, "Flux2KleinPipeline": CHAT}.get(name)
        made["tokenizer"] = byte_tokenizer(chat, left=kind == "flux2-dev")
        made["text_encoder"] = text_model(kind, made["tokenizer"])
        width = made["text_encoder"].config.get_text_config().hidden_size
        if "Edit" in name:
            made["processor"] = processor(made["tokenizer"])
        if name.startswith("Qwen"):
            made["transformer"] = diffusers.QwenImageTransformer2DModel(**transformer, joint_attention_dim=width)
            made["vae"] = diffusers.AutoencoderKLQwenImage(**QWEN_VAE)
        else:
            made["transformer"] = diffusers.Flux2Transformer2DModel(**transformer, joint_attention_dim=3 * width)
            made["vae"] = diffusers.AutoencoderKLFlux2(**VAE)
    for seed, part in enumerate(("text_encoder", "text_encoder_2", "transformer", "vae")):
        if part in made:
            tiny_wan.harsh(made[part], seed)
    if hasattr(made["vae"], "bn"):
        made["vae"].bn.running_mean.copy_(0.3 * torch.randn(16))
        made["vae"].bn.running_var.copy_(0.5 + torch.rand(16))
    return made


def pipeline(kind: str) -> diffusers.DiffusionPipeline:
    """The pipeline of diffusers."""
    made = getattr(diffusers, KINDS[kind][0])(**components(kind), **KINDS[kind][-1])
    made.set_progress_bar_config(disable=True)
    return made


def save(kind: str, folder: Path) -> Path:
    """A diffusers folder."""
    pipeline(kind).save_pretrained(folder)
    return folder
