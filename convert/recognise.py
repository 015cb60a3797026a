"""What a file of weights looks like, from the names of its tensors: for the message when nothing fits it."""

import re
from collections.abc import Iterable

# (what it looks like, a pattern that its keys match), the more telling first
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("a LoRA or another adapter, not a whole model", r"(^|\.)lora_(A|B|up|down)\.|\.lora_[AB]$"),
        ("a quantized export (SVDQuant, of Nunchaku)", r"\.(wscales|smooth_factor|smooth_factor_orig)$"),
        ("a quantized export (GPTQ, AWQ)", r"\.(qweight|qzeros|g_idx)$"),
        ("a quantized export (bitsandbytes)", r"\.(absmax|quant_map|SCB|quant_state\.bitsandbytes__\w+)$"),
        ("a quantized export (scaled fp8)", r"\.(weight_scale|weight_scale_inv|input_scale|scale_weight|comfy_quant)$"),
        ("FLUX.1 or FLUX.2, original layout", r"(^|\.)(double_blocks|single_blocks)\.\d+\."),
        ("FLUX.1 or FLUX.2, diffusers layout", r"(^|\.)single_transformer_blocks\.\d+\."),
        ("Qwen-Image, diffusers layout", r"(^|\.)transformer_blocks\.\d+\.(img_mod|txt_mod)\."),
        ("Wan, diffusers layout", r"(^|\.)(condition_embedder\.|blocks\.\d+\.attn2\.)"),
        ("Wan, original layout", r"(^|\.)blocks\.\d+\.cross_attn\.(q|k|v|o)\."),
        ("Cosmos, original layout", r"(^|\.)blocks\.\d+\.(cross_attn|self_attn)\.(q_proj|output_proj)\."),
        ("another diffusers transformer", r"(^|\.)transformer_blocks\.\d+\."),
        ("a U-Net (Stable Diffusion)", r"(^|\.)(input_blocks|output_blocks|up_blocks|down_blocks)\.\d+\.\d*"),
        ("Llama or Mistral, the authors' own layout", r"(^|\.)layers\.\d+\.attention\.w[qkvo]\."),
        ("a mixture-of-experts decoder", r"\.layers\.\d+\.(mlp|block_sparse_moe|feed_forward)\.experts\."),
        ("Phi-3, fused projections", r"(^|\.)layers\.\d+\.(self_attn\.qkv_proj|mlp\.gate_up_proj)\."),
        ("Gemma 2 or 3", r"(^|\.)layers\.\d+\.(pre|post)_feedforward_layernorm\."),
        ("a hybrid linear-attention decoder (Qwen3.5, Qwen3-Next)", r"(^|\.)layers\.\d+\.linear_attn\."),
        ("CLIP, transformers layout", r"(^|\.)(text_model|vision_model)\.encoder\.layers\.\d+\."),
        ("Llama, Mistral, Qwen2 or Qwen3, transformers layout", r"(^|\.)layers\.\d+\.self_attn\.[qkvo]_proj\."),
        ("T5 or UMT5, transformers layout", r"(^|\.)(encoder|decoder)\.block\.\d+\.layer\.\d+\."),
        ("UMT5, Wan layout", r"(^|\.)blocks\.\d+\.ffn\.gate\.\d+\."),
        ("BERT", r"(^|\.)encoder\.layer\.\d+\.attention\.self\."),
        ("GPT-2", r"(^|\.)h\.\d+\.attn\.c_attn\."),
        ("GPT-NeoX", r"(^|\.)layers\.\d+\.attention\.query_key_value\."),
        ("Mamba", r"\.layers\.\d+\.mixer\."),
        ("an autoencoder (VAE)", r"^(encoder|decoder)\.(conv_in|conv1|down|up|mid|middle|conv_out)"),
        ("optimizer state, not weights", r"(^|\.)(exp_avg|exp_avg_sq|param_groups)(\.|$)"),
    )
)
WRAPPERS = (
    *("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."),
    *("transformer.", "model.diffusion_model.", "diffusion_model.", "state_dict."),
    *("base_model.model.", "net.", "model."),
    *("vae.", "first_stage_model.", "cond_stage_model.", "clip_vision."),  # parts of ComfyUI's files
    *("text_encoders.clip_l.", "text_encoders.t5xxl."),
)
# What wraps modules inside of a model: torch.compile, FSDP, recomputed activations, PEFT's adapters.
_INNER = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")
_BASE_LAYER = re.compile(r"(?<![^.])base_layer\.")
_ADAPTER = re.compile(r"(?<![^.])(?:lora_\w+|ia3_l|hada_w\d_[ab]|lokr_w\d(?:_[ab])?|oft_r|vera_lambda_[bd])(?:\.|$)")
_ENCODER = re.compile(r"text_encoders\.[^.]+\.")  # the same, whatever the encoder is called


def looks_like(keys: Iterable[str]) -> str:
    """What the tensors seem to be, in words; says so where nothing is known of such names."""
    names = list(keys)
    if not names:
        return "no tensors at all"
    for name, pattern in _SIGNS:
        if sum(1 for key in names if pattern.search(key)) > len(names) // 20:
            return name
    return f"nothing known (tensors such as {', '.join(names[:3])})"


def common_prefixes(keys: Iterable[str]) -> list[str]:
    """The prefixes, cut at dots, that all keys share: "" first, then longer ones."""
    names = list(keys)
    prefixes = [""]
    parts = names[0].split(".")[:-1] if names else []
    for part in parts:
        prefix = f"{prefixes[-1]}{part}."
        if not all(name.startswith(prefix) for name in names):
            break
        prefixes.append(prefix)
    return prefixes


def without_inner_wrappers(keys: Iterable[str]) -> dict[str, str]:
    """Key without the names of modules' wrappers -> key; of keys that have none, and of those that would be alike, {}.

    What all keys begin with stays: that is a prefix.
    """
    names = list(keys)
    start = len(common_prefixes(names)[-1])
    bare = {name[:start] + _INNER.sub("", name[start:]): name for name in names}
    return bare if len(bare) == len(names) and set(bare) != set(names) else {}


def adapters_beside(keys: Iterable[str]) -> list[str]:
    """Tensors of adapters in a model that PEFT has wrapped and that was saved whole: beside the weights they change."""
    names = list(keys)
    return [n for n in names if _ADAPTER.search(n)] if any(_BASE_LAYER.search(n) for n in names) else []


def is_wrapper(prefix: str) -> bool:
    """Whether `prefix` is made of nothing but names that training code is known to wrap models in."""
    prefix = _ENCODER.sub("", prefix, count=1)
    while prefix:
        wrapper = next((name for name in WRAPPERS if prefix.startswith(name)), None)
        if wrapper is None:
            return False
        prefix = prefix.removeprefix(wrapper)
    return True
