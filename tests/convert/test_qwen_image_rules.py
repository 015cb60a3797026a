"""The Qwen-Image family: published tensor lists matched, configs and sizes read, bits kept."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from hollow import write_hollow
from safetensors.numpy import load_file, save_file
from torch_qwen_image import SIZES, build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.qwen_image import FAMILY, ZERO_COND, read_config, write_config
from shardzoo.convert.rules import gaps
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen_image

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


def assert_one_to_one(plan, keys, prefix=""):
    pieces = [piece for path, leaf in plan.leaves.items() if "carried" not in path for piece in leaf.pieces]
    taken = {prefix + key: 0 for key in keys}
    for piece in pieces:
        taken[piece.source] += math.prod(b - a for a, b in piece.take)
    assert taken == {prefix + key: math.prod(shape) for key, shape in keys.items()}
    assert gaps(pieces, layout.named(plan.declared)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched(tmp_path, name):
    keys, config = published_keys(name)
    assert len(keys) == PUBLISHED[name]
    assert sum(map(math.prod, keys.values())) == PARAMETERS + (2 * 3072 if name == "layered" else 0)
    plan = plan_conversion(write_hollow(tmp_path, keys, config))
    assert (plan.family, plan.layout, plan.config) == ("qwen-image", "diffusers", qwen_image.PRESETS[name])
    assert not plan.carried and not plan.skipped
    assert_one_to_one(plan, keys)


@pytest.mark.parametrize("name", PUBLISHED)
def test_single_files_with_a_prefix_tell_sizes_and_variant(tmp_path, name):
    keys, _ = published_keys(name)
    prefix = "model.diffusion_model."
    marker = {prefix + ZERO_COND: (0,)} if name == "edit-2511" else {}
    plan = plan_conversion(write_hollow(tmp_path, {prefix + k: v for k, v in keys.items()} | marker, None))
    assert (plan.family, plan.layout, plan.config) == ("qwen-image", "single file", qwen_image.PRESETS[name])
    assert set(plan.carried) == set(marker)
    assert_one_to_one(plan, keys, prefix)


def write(folder, named, config=None):
    folder.mkdir()
    save_file(named, folder / ("diffusion_pytorch_model.safetensors" if config else "qwen_image.safetensors"))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(a.dtype == other[k].dtype and a.tobytes() == other[k].tobytes() for k, a in one.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_of_diffusers_there_and_back(tmp_path, name):
    model, saved, config = build(**VARIANTS[name])
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    source = write(tmp_path / "source", named, KIND | saved)
    convert(source, tmp_path / "a", sync=False)
    verify(tmp_path / "a", source)
    opened = checkpoints.open(tmp_path / "a")
    assert opened.config == config
    for path, value in values({k: v.astype(np.float32) for k, v in named.items()}, config).items():
        assert np.array_equal(opened.read(path).astype(np.float32), value), path
    export(tmp_path / "a", tmp_path / "out")
    same(loaded(tmp_path / "out"), named)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert read_config(write_config(config, "diffusers"), {}) == config


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
def test_a_single_file_there_and_back(tmp_path, prefix):
    """Its sizes and its variant come from the tensors."""
    model, _, config = build(**WIDE, zero_cond_t=True)
    single = {prefix + k: v.astype(np.float16) for k, v in arrays(model).items()}
    single[prefix + ZERO_COND] = np.zeros(0, np.float32)
    convert(write(tmp_path / "source", single), tmp_path / "a", sync=False)
    assert checkpoints.open(tmp_path / "a").config == config
    export(tmp_path / "a", tmp_path / "out")
    same(loaded(tmp_path / "out"), single)


def test_each_layout_is_written_from_the_other(tmp_path):
    model, saved, config = build(**WIDE, **VARIANTS["layered"])
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    single = {"model.diffusion_model." + k: v for k, v in named.items()}
    convert(write(tmp_path / "source", named, KIND | saved), tmp_path / "a", sync=False)
    export(tmp_path / "a", tmp_path / "single", layout="single file")
    same(loaded(tmp_path / "single"), single)
    assert not (tmp_path / "single/config.json").exists()
    convert(tmp_path / "single", tmp_path / "b", sync=False)
    export(tmp_path / "b", tmp_path / "again", layout="diffusers")
    same(loaded(tmp_path / "again"), named)
    assert read_config(json.loads((tmp_path / "again/config.json").read_text()), {}) == config
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
