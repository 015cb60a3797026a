"""Tiny multimodal Qwen3.5 models of transformers with harsh random weights, and their weights as our declarations'."""

import numpy as np
import torch
import transformers
from torch_qwen3_5 import CASES, harsh
from torch_values import by_rules

from shardzoo.convert.families import qwen3_5 as text_rules
from shardzoo.convert.families import qwen3_5_vision as vision_rules
from shardzoo.zoo import qwen3_5, qwen3_5_vision

IMAGE, VIDEO, START, END = 152, 153, 154, 155
VISION = dict(
    model_type="qwen3_5_vision", depth=2, hidden_size=32, hidden_act="gelu_pytorch_tanh", intermediate_size=48,
    num_heads=4, in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64,
    num_position_embeddings=16,
)  # fmt: skip


def build(seed=0, **vision):
    """The torch model in float32 with no weight at a trivial value, its config, and ours of both parts."""
    theirs = transformers.Qwen3_5Config(
        text_config={**CASES["published-pattern"], "model_type": "qwen3_5_text"}, vision_config={**VISION, **vision},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen3_5ForConditionalGeneration(theirs).eval()
    harsh(model)
    with torch.no_grad():
        for name, weight in model.model.visual.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.copy_(1 + 0.5 * torch.randn_like(weight))
            if name == "pos_embed.weight":
                weight.copy_(0.5 * torch.randn_like(weight))
    saved = model.config.to_dict()
    return model, saved, vision_rules.read_config(saved, {}), text_rules.read_config(saved, {})


def values(named, config):
    """Our paths -> arrays of either part, from torch names -> arrays (weights, or their gradients)."""
    eyes = isinstance(config, qwen3_5_vision.Config)
    ours, rules = (qwen3_5_vision, vision_rules) if eyes else (qwen3_5, text_rules)
    return by_rules(named, ours.declare(config), rules.LAYOUTS, "transformers, multimodal", rules.RULES)


PROMPTS = {  # grids of images; of videos; tokens, with "image" and "frame" for the next of those
    "one": (((1, 4, 4),), (), [[5, START, "image", END, 9]]),
    "several": (
        ((1, 4, 6), (1, 2, 2), (1, 8, 4)),
        (),
        [[5, 7, START, "image", END, 1, 2, START, "image", END], [START, "image", END, 3, 4, 8, 6]],
    ),
    "video": (
        ((1, 2, 4), (1, 4, 4)),
        ((2, 4, 2), (1, 2, 2)),
        [
            [3, START, "frame", END, 8, START, "frame", END, START, "image", END],
            [START, "image", END, 5, 6, START, "frame", END, 1],
        ],
    ),
}


def prompt(name, side="right"):
    """Grids of images and of videos, tokens padded on this side, their mask."""
    images, videos, rows = PROMPTS[name]
    sizes = {
        "image": iter([np.prod(grid) // 4 for grid in images]),
        "frame": iter([rows * columns // 4 for t, rows, columns in videos for _ in range(t)]),
    }
    tokens = {"image": IMAGE, "frame": VIDEO}

    def spelled(x):
        return [tokens[x]] * int(next(sizes[x])) if isinstance(x, str) else [x]

    rows = [[token for x in row for token in spelled(x)] for row in rows]
    longest = max(map(len, rows)) + 2
    ids, mask = np.full((len(rows), longest), 151), np.zeros((len(rows), longest), bool)
    for row, given in enumerate(rows):
        at = slice(longest - len(given), None) if side == "left" else slice(len(given))
        ids[row, at], mask[row, at] = given, True
    return images, videos, ids, mask


def given(pixels, images, videos, tokens):
    """What transformers takes beside tokens and mask; `pixels` are those of the images, then those of the videos."""
    kinds = torch.tensor(np.where(tokens == IMAGE, 1, np.where(tokens == VIDEO, 2, 0)), dtype=torch.int32)
    first = sum(map(np.prod, images))
    shown = dict(mm_token_type_ids=kinds)
    for some, grids, end in ((pixels[:first], images, ""), (pixels[first:], videos, "_videos")):
        if grids:
            shown[f"pixel_values{end}"] = torch.tensor(some)
            shown["video_grid_thw" if end else "image_grid_thw"] = torch.tensor(grids)
    return shown
