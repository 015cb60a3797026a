"""Tiny Qwen2.5-VL models of transformers with harsh random weights, and their weights as values of our declarations."""

import torch
import transformers
from torch_values import by_rules, harshen

from shardzoo.convert.families import decoder as decoder_rules
from shardzoo.convert.families import qwen_vision as vision_rules
from shardzoo.zoo import decoder, qwen2_5_vl

TEXT = dict(
    model_type="qwen2_5_vl_text", vocab_size=160, hidden_size=64, intermediate_size=72, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
)  # fmt: skip
VISION = dict(
    depth=3, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=64, patch_size=6,
    spatial_merge_size=2, temporal_patch_size=2, window_size=36, fullatt_block_indexes=[1],
)  # fmt: skip
IMAGE = 152  # the token that an image's features stand in for


def build(seed=0, vision=None):
    """The torch model in float32 with no weight at a trivial value, its config, and ours of both towers."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config={**VISION, **(vision or {})}, image_token_id=IMAGE, video_token_id=153,
        vision_start_token_id=154, vision_end_token_id=155, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    harshen(model, is_norm=lambda name, weight: weight.ndim == 1 and ("norm" in name or "ln_q" in name))
    saved = config.to_dict()
    return model, saved, vision_rules.read_config(saved, {}), decoder_rules.read_config(saved, {})


def values(named, config):
    """Our paths -> arrays of either tower, from torch names -> arrays (weights, or their gradients)."""
    ours, rules = (qwen2_5_vl, vision_rules) if isinstance(config, qwen2_5_vl.Config) else (decoder, decoder_rules)
    return by_rules(named, ours.declare(config), rules.LAYOUTS, "transformers, multimodal", rules.RULES)
