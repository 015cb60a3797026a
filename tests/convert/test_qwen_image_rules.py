"""The Qwen-Image family: published tensor lists matched, configs and sizes read, bits kept."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from hollow import write_hollow
from torch_qwen_image import SIZES, build, values
from torch_values import arrays
from weight_files import comes_back, each_is_written_from_the_other, holds, taken_once, write

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.families.qwen_image import FAMILY, ZERO_COND, read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import qwen_image

PUBLISHED = {"qwen-image": 1933, "edit-2511": 1933, "layered": 1934}  # tensors
PARAMETERS = 20_430_401_088
KIND = {"_class_name": "QwenImageTransformer2DModel"}
# variants of a tiny model, one with heads as wide as the published ones', which single files rely on
VARIANTS = {
    "qwen-image": {},
    "edit-2511": dict(zero_cond_t=True),
    "layered": dict(use_layer3d_rope=True, use_additional_t_cond=True),
}
WIDE = dict(attention_head_dim=128, num_attention_heads=2, axes_dims_rope=(16, 56, 56), num_layers=3)


def published_keys(name):
    """Keys and shapes of the class itself, without memory for its weights."""
    config = write_config(qwen_image.PRESETS[name], "diffusers")
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(**{k: v for k, v in config.items() if k != "_class_name"})
    return {k: tuple(v.shape) for k, v in model.state_dict().items()}, config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched(tmp_path, name):
    keys, config = published_keys(name)
    assert len(keys) == PUBLISHED[name]
    assert sum(map(math.prod, keys.values())) == PARAMETERS + (2 * 3072 if name == "layered" else 0)
    plan = plan_conversion(write_hollow(tmp_path, keys, config))
    assert (plan.family, plan.layout, plan.config) == ("qwen-image", "diffusers", qwen_image.PRESETS[name])
    assert not plan.carried and not plan.skipped
    taken_once(plan, keys)


@pytest.mark.parametrize("name", PUBLISHED)
def test_single_files_with_a_prefix_tell_sizes_and_variant(tmp_path, name):
    keys, _ = published_keys(name)
    prefix = "model.diffusion_model."
    marker = {prefix + ZERO_COND: (0,)} if name == "edit-2511" else {}
    plan = plan_conversion(write_hollow(tmp_path, {prefix + k: v for k, v in keys.items()} | marker, None))
    assert (plan.family, plan.layout, plan.config) == ("qwen-image", "single file", qwen_image.PRESETS[name])
    assert set(plan.carried) == set(marker)
    taken_once(plan, keys, prefix)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_of_diffusers_there_and_back(tmp_path, name):
    model, saved, config = build(**VARIANTS[name])
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    source = write(tmp_path / "source", named, KIND | saved)
    comes_back(source, tmp_path / "a")
    assert checkpoints.open(tmp_path / "a").config == config
    holds(tmp_path / "a", values({k: v.astype(np.float32) for k, v in named.items()}, config))
    assert read_config(write_config(config, "diffusers"), {}) == config


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
def test_a_single_file_there_and_back(tmp_path, prefix):
    """Its sizes and its variant come from the tensors."""
    model, _, config = build(**WIDE, zero_cond_t=True)
    single = {prefix + k: v.astype(np.float16) for k, v in arrays(model).items()}
    single[prefix + ZERO_COND] = np.zeros(0, np.float32)
    comes_back(write(tmp_path / "source", single), tmp_path / "a")
    assert checkpoints.open(tmp_path / "a").config == config


def test_each_layout_is_written_from_the_other(tmp_path):
    model, saved, config = build(**WIDE, **VARIANTS["layered"])
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    single = {"model.diffusion_model." + k: v for k, v in named.items()}
    source = write(tmp_path / "source", named, KIND | saved)
    again = each_is_written_from_the_other(tmp_path, source, single, "single file")
    assert not (tmp_path / "single file/config.json").exists()
    assert read_config(json.loads((again / "config.json").read_text()), {}) == config
    with pytest.raises(InputError, match="zero_cond: nothing but a tensor"):
        write_config(qwen_image.PRESETS["edit-2511"], "single file")


def test_tensors_that_do_not_tell_the_sizes_are_refused(tmp_path):
    model, *_ = build()
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    with pytest.raises(InputError, match=r"heads do not tell \(heads are 128 wide(.|\n)*--config"):
        convert(write(tmp_path / "source", named), tmp_path / "a")
    with pytest.raises(InputError, match=r"image, text, mlp, out, heads do not tell"):
        FAMILY.read_config({}, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "60"}, "num_layers='60'"),
        ({"zero_cond_t": 1}, "zero_cond_t=1 is not true or false"),
        ({"guidance_embeds": True}, "guidance_embeds=true is not supported"),
        ({"axes_dims_rope": [16, "x", 56]}, "axes_dims_rope"),
        ({"axes_dims_rope": [4, 4, 4]}, "head_dim=16"),
    ],
)
def test_what_is_not_done_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        read_config({**KIND, **SIZES, **change}, {})


def test_defaults_are_those_of_diffusers():
    assert read_config(KIND, {}) == qwen_image.PRESETS["qwen-image"]
    assert read_config({**KIND, "out_channels": None}, {}).out_channels == 4 * 64
