"""The Wan autoencoders: published tensor lists matched one to one in every layout, tiny models there and back."""

import json
import math
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from hollow import write_hollow
from tiny_models import bits, files
from torch_values import arrays
from torch_wan_vae import CASES, WAN21, WAN22, build, values

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.wan_vae import read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import layout, wan_vae
from shardzoo.zoo.mesh import make_mesh

# Names in diffusers -> the authors', by pattern, in this order.
AUTHORS = (
    (r"^quant_conv", "conv1"),
    (r"^post_quant_conv", "conv2"),
    (r"conv_in\.", "conv1."),
    (r"norm_out\.", "head.0."),
    (r"conv_out\.", "head.2."),
    (r"mid_block\.resnets\.0", "middle.0"),
    (r"mid_block\.attentions\.0", "middle.1"),
    (r"mid_block\.resnets\.1", "middle.2"),
    (r"(middle\.\d|resnets\.\d|down_blocks\.\d+)\.norm1\.", r"\1.residual.0."),
    (r"(middle\.\d|resnets\.\d|down_blocks\.\d+)\.conv1\.", r"\1.residual.2."),
    (r"(middle\.\d|resnets\.\d|down_blocks\.\d+)\.norm2\.", r"\1.residual.3."),
    (r"(middle\.\d|resnets\.\d|down_blocks\.\d+)\.conv2\.", r"\1.residual.6."),
    (r"conv_shortcut", "shortcut"),
)


def author_name(key, blocks=2):
    """What the authors call a tensor of diffusers."""
    for pattern, name in AUTHORS:
        key = re.sub(pattern, name, key)
    nested_down = re.match(r"encoder\.down_blocks\.(\d+)\.(resnets\.(\d+)|downsampler)\.(.*)", key)
    if nested_down:
        level, _, i, rest = nested_down.groups()
        return f"encoder.downsamples.{level}.downsamples.{blocks if i is None else i}.{rest}"
    key = key.replace("encoder.down_blocks.", "encoder.downsamples.")
    return key


def authors(keys, *, flat, blocks=2):
    """A state dict of diffusers under the authors' names."""
    found = {}
    for key, value in keys.items():
        key = author_name(key, blocks)
        up = re.match(r"decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0|upsampler)\.(.*)", key)
        if up:
            level, i, rest = int(up[1]), blocks + 1 if up[2] is None else int(up[2]), up[3]
            place = f"{level * (blocks + 2) + i}" if flat else f"{level}.upsamples.{i}"
            key = f"decoder.upsamples.{place}.{rest}"
        found[key] = value
    return found


def published_keys(preset):
    """Names and shapes that diffusers gives the published sizes, without their memory."""
    config = wan_vae.PRESETS[preset]
    fields = write_config(config, "diffusers")
    with torch.device("meta"):
        model = AutoencoderKLWan(**{k: v for k, v in fields.items() if not k.startswith("_")})
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


PUBLISHED = {"wan2.1-vae": (194, 126_892_531), "wan2.2-vae": (196, 704_688_668)}


@pytest.mark.parametrize("preset", PUBLISHED)
@pytest.mark.parametrize("source", ["diffusers", "diffusers without config", "original"])
def test_published_lists_match_one_to_one(tmp_path, preset, source):
    keys, config = published_keys(preset), wan_vae.PRESETS[preset]
    assert (len(keys), sum(map(math.prod, keys.values()))) == PUBLISHED[preset]
    keys = authors(keys, flat=not config.shortcuts) if source == "original" else keys
    assert len(keys) == PUBLISHED[preset][0]
    fields = write_config(config, "diffusers") if source == "diffusers" else None
    plan = plan_conversion(write_hollow(tmp_path, keys, fields, dtype="F32"))
    assert (plan.family, plan.layout, plan.config) == ("wan-vae", source.split()[0], config)
    pieces = [piece.source for leaf in plan.leaves.values() for piece in leaf.pieces]
    assert sorted(pieces) == sorted(keys) and not plan.carried and not plan.skipped


@pytest.mark.parametrize("source", ["diffusers", "diffusers without config", "original"])
def test_qwen_images_list_matches_one_to_one(tmp_path, source):
    """Of its folder, which names another class, and of ComfyUI's single file, which has the authors' names."""
    with torch.device("meta"):
        model = AutoencoderKLQwenImage()
    keys = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert (len(keys), sum(map(math.prod, keys.values()))) == PUBLISHED["wan2.1-vae"]
    keys = authors(keys, flat=True) if source == "original" else keys
    fields = {"_class_name": "AutoencoderKLQwenImage", **model.config} if source == "diffusers" else None
    plan = plan_conversion(write_hollow(tmp_path, keys, fields))
    assert (plan.family, plan.layout) == ("wan-vae", source.split()[0])
    assert plan.config == wan_vae.PRESETS["qwen-image-vae"]
    pieces = [piece.source for leaf in plan.leaves.values() for piece in leaf.pieces]
    assert sorted(pieces) == sorted(keys) and not plan.carried and not plan.skipped


def test_the_authors_names_are_those_of_their_files():
    """A few of each kind, as the files have them."""
    one = authors(published_keys("wan2.1-vae"), flat=True)
    levels = authors(published_keys("wan2.2-vae"), flat=False)
    for key in ("conv1.weight", "conv2.bias", "encoder.conv1.weight", "encoder.head.0.gamma", "decoder.head.2.bias"):
        assert key in one and key in levels
    assert one["encoder.downsamples.5.time_conv.weight"] == (192, 192, 3, 1, 1)
    assert one["decoder.upsamples.14.residual.6.weight"] == (96, 96, 3, 3, 3)
    assert one["decoder.upsamples.3.resample.1.weight"] == (192, 384, 3, 3)
    assert one["encoder.middle.1.to_qkv.weight"] == (1152, 384, 1, 1)
    assert levels["decoder.upsamples.2.upsamples.0.shortcut.weight"] == (512, 1024, 1, 1, 1)
    assert levels["encoder.downsamples.1.downsamples.2.time_conv.weight"] == (320, 320, 3, 1, 1)


def assert_values(checkpoint, model, config):
    live = checkpoints.restore(checkpoint, make_mesh(), family="wan-vae")
    assert live.config == config
    want, got = values(arrays(model), config), layout.named(live)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[path]), value, err_msg=path)


QUICK = ("2.1", "qwen-image", "2.2, no patches")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_folder_of_diffusers_there_and_back(tmp_path, name):
    model, _, config = build(name)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


def load(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(bits(got[key]), bits(value))


@pytest.mark.parametrize(
    "name, kind",
    [("2.1, narrow", "pth"), ("2.2", "pth"), ("qwen-image", "safetensors")]
    + [pytest.param("2.1", kind, marks=pytest.mark.slow) for kind in ("pth", "safetensors")],
)
def test_a_file_of_the_authors_there_and_back(tmp_path, name, kind):
    """A .pth, and ComfyUI's single files of the same names; a config, as the statistics are not those published."""
    model, saved, config = build(name)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state = authors(state, flat=not config.shortcuts, blocks=config.blocks)
    source = tmp_path / f"vae.{kind}"
    torch.save(state, source) if kind == "pth" else safetensors.torch.save_file(state, source)
    (tmp_path / "fields.json").write_text(json.dumps({k: v for k, v in saved.items() if k != "_use_default_values"}))
    convert(source, tmp_path / "ckpt", config=tmp_path / "fields.json", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert_same(load(tmp_path / "out"), state)


@pytest.mark.parametrize("name", ["2.1", pytest.param("2.2", marks=pytest.mark.slow)])
def test_one_layout_becomes_the_other(tmp_path, name):
    model, _, config = build(name)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    export(tmp_path / "ckpt", tmp_path / "out", layout="original")
    assert_same(load(tmp_path / "out"), authors(dict(model.state_dict()), flat=not config.shortcuts))


def test_without_a_config_unknown_statistics_are_asked_for(tmp_path):
    model, _, _ = build("2.1")
    torch.save(authors(dict(model.state_dict()), flat=True), tmp_path / "vae.pth")
    with pytest.raises(InputError, match=r"latents_mean and latents_std for 4 latent channels: name a config.json"):
        plan_conversion(tmp_path / "vae.pth")


def test_configs_are_read_and_written():
    for name in CASES:
        config = build(name)[2]
        assert read_config(write_config(config, "diffusers"), {}) == config
    assert write_config(config, "original") is None
    assert read_config({"_class_name": "AutoencoderKLWan"}, {}) == wan_vae.PRESETS["wan2.1-vae"]
    assert read_config(WAN22, {}).patch == 2 and read_config(WAN21, {}).patch == 1


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(base_dim="96"), "base_dim='96' is not a whole number"),
        (dict(dim_mult=[1, 2.5]), "dim_mult=.* is not a list of whole numbers"),
        (dict(dim_mult=3), "dim_mult=3 is not a list"),
        (dict(temperal_downsample=[0, 1, 1]), "temperal_downsample=.* is not a list of true and false"),
        (dict(latents_mean=["a"]), "latents_mean"),
        (dict(attn_scales=[0.5]), "attn_scales"),
        (dict(is_residual=1), "is_residual=1 is not true or false"),
        (dict(out_channels=12), "in_channels=3 and out_channels=12"),
        (dict(patch_size=2), "channels of patches of 2"),
        (dict(latents_std=[1.0]), "latent_std has 1 numbers"),
    ],
)
def test_what_the_autoencoder_does_not_do_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        read_config({**WAN21, **change}, {})


def test_a_config_of_more_blocks_than_the_tensors_have(tmp_path):
    """The tensors fit the layout of one block a level whole; what the config declares besides is told."""
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False]}
    model = AutoencoderKLQwenImage(**sizes, latents_mean=[0.1] * 4, latents_std=[1.0] * 4)
    keys = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    config = {**model.config, "_class_name": "AutoencoderKLQwenImage"}
    assert plan_conversion(write_hollow(tmp_path / "one", keys, config)).config.blocks == 1
    config.pop("num_res_blocks")
    with pytest.raises(InputError, match=r"encoder\.levels\.\{0-1\}\.blocks\.1\.conv1\.weight: none of its tensors is"):
        plan_conversion(write_hollow(tmp_path / "two", keys, config))
