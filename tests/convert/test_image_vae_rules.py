"""The image autoencoders: published tensor lists matched one to one in every layout, tiny models there and back."""

import json
import math
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from hollow import write_hollow
from tiny_models import bits, files
from torch_image_vae import CASES, FLUX1, FLUX2, arrays, build, values

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import rules_of
from shardzoo.convert.families.image_vae import read_config, write_config
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError
from shardzoo.zoo import image_vae, layout
from shardzoo.zoo.mesh import make_mesh

# Names in diffusers -> the original's, by pattern.
NAMES = (
    (r"^(post_)?quant_conv", lambda m: f"decoder.{m[0]}" if m[1] else f"encoder.{m[0]}"),
    (r"conv_norm_out", "norm_out"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
    (r"mid_block\.attentions\.0\.to_", "mid.attn_1."),
    (r"conv_shortcut", "nin_shortcut"),
    (r"(down|up)_blocks\.(\d+)\.resnets\.", r"\1.\2.block."),
    (r"(down|up)_blocks\.(\d+)\.(down|up)samplers\.0", r"\1.\2.\1sample"),
)


def original(state, levels, reshape):
    """A state dict of diffusers under the original's names; `reshape` adds two dims of 1 to the attention's weights."""
    found = {}
    for key, value in state.items():
        square = "attentions" in key and "norm" not in key and key.endswith("weight")
        for pattern, name in NAMES:
            key = re.sub(pattern, name, key)
        key = re.sub(r"decoder\.up\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", key)
        found[key] = reshape(value) if square else value
    return found


def published_keys(preset):
    """Names and shapes that diffusers gives the published sizes, without their memory."""
    config = image_vae.PRESETS[preset]
    fields = {k: v for k, v in write_config(config, "diffusers").items() if not k.startswith("_")}
    with torch.device("meta"):
        model = (AutoencoderKLFlux2 if config.statistics else AutoencoderKL)(**fields)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


PUBLISHED = {"flux1-vae": (244, 83_819_683), "flux2-vae": (251, 84_046_115 + 256 + 1)}
COUNTER = "bn.num_batches_tracked"


@pytest.mark.parametrize("preset", PUBLISHED)
@pytest.mark.parametrize("source", ["diffusers", "diffusers without config", "original", "original, in a whole file"])
def test_published_lists_match_one_to_one(tmp_path, preset, source):
    keys, config = published_keys(preset), image_vae.PRESETS[preset]
    assert (len(keys), sum(map(math.prod, keys.values()))) == PUBLISHED[preset]
    keys = original(keys, 4, lambda shape: (*shape, 1, 1)) if "original" in source else keys
    keys = {f"vae.{key}": shape for key, shape in keys.items()} if "whole" in source else keys
    fields = write_config(config, "diffusers") if source == "diffusers" else None
    plan = plan_conversion(write_hollow(tmp_path, keys, fields, dtype="F32"))
    assert (plan.family, plan.layout, plan.config) == ("image-vae", re.split("[ ,]", source)[0], config)
    pieces = [p.source for path, leaf in plan.leaves.items() if not path.startswith("carried") for p in leaf.pieces]
    carried = [key for key in keys if key.endswith(COUNTER)]
    assert [*plan.carried] == carried and not plan.skipped
    assert sorted([*pieces, *carried]) == sorted(keys)


def test_the_originals_names_are_those_of_its_files():
    """A few of each kind, as the files have them."""
    keys = original(published_keys("flux2-vae"), 4, lambda shape: (*shape, 1, 1))
    assert keys["decoder.up.0.block.0.nin_shortcut.weight"] == (128, 256, 1, 1)
    assert (
        keys["decoder.up.3.upsample.conv.weight"] == (512, 512, 3, 3) and "decoder.up.0.upsample.conv.bias" not in keys
    )
    assert keys["encoder.down.1.block.0.nin_shortcut.weight"] == (256, 128, 1, 1)
    assert keys["encoder.down.0.downsample.conv.weight"] == (128, 128, 3, 3)
    assert keys["encoder.mid.attn_1.proj_out.weight"] == keys["decoder.mid.attn_1.q.weight"] == (512, 512, 1, 1)
    assert keys["encoder.quant_conv.weight"] == (64, 64, 1, 1) and keys["decoder.post_quant_conv.bias"] == (32,)
    assert keys["decoder.norm_out.weight"] == (128,) and keys["encoder.mid.attn_1.norm.bias"] == (512,)
    assert keys["bn.running_mean"] == (128,) and keys[COUNTER] == ()


def assert_values(checkpoint, model, config):
    live = checkpoints.restore(checkpoint, make_mesh(), family="image-vae")
    assert live.config == config
    want, got = values(arrays(model), config), layout.named(live)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[path]), value, err_msg=path)


slow = pytest.mark.slow
QUICK = ("flux1", "two levels, statistics")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in CASES])
def test_a_folder_of_diffusers_there_and_back(tmp_path, name):
    """With the counter of FLUX.2, which has eight bytes, carried along."""
    model, _, config = build(name)
    model.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert [*report.carried] == ([COUNTER] if config.statistics else [])
    assert_values(tmp_path / "ckpt", model, config)
    assert verify(tmp_path / "ckpt", tmp_path / "source").equal
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


def load(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(bits(got[key]), bits(value))


def as_original(model, config):
    return original(dict(model.state_dict()), len(config.widths), lambda w: w[..., None, None].clone())


@pytest.mark.parametrize(
    "name, prefix",
    [("flux2", ""), ("two levels", "first_stage_model.")]
    + [pytest.param(name, prefix, marks=slow) for name in CASES for prefix in ("", "vae.")],
)
def test_a_file_of_the_original_there_and_back(tmp_path, name, prefix):
    """In half precision but for the counter; a config, as no tensor tells the groups and the units."""
    model, saved, config = build(name)
    model = model.bfloat16()
    state = {prefix + key: value.contiguous() for key, value in as_original(model, config).items()}
    safetensors.torch.save_file(state, tmp_path / "ae.safetensors")
    (tmp_path / "fields.json").write_text(json.dumps(saved))
    convert(tmp_path / "ae.safetensors", tmp_path / "ckpt", config=tmp_path / "fields.json", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert_same(load(tmp_path / "out"), state)


@pytest.mark.parametrize("name", [pytest.param("flux1", marks=slow), "three levels, narrow decoder"])
def test_one_layout_becomes_the_other(tmp_path, name):
    model, _, config = build(name)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    export(tmp_path / "ckpt", tmp_path / "out", layout="original")  # of as many levels as it has
    want = as_original(model, config)
    assert_same(load(tmp_path / "out"), want)
    safetensors.torch.save_file(want, tmp_path / "ae.safetensors")
    (tmp_path / "fields.json").write_text(json.dumps(write_config(config, "diffusers")))
    convert(tmp_path / "ae.safetensors", tmp_path / "again", config=tmp_path / "fields.json", sync=False)
    export(tmp_path / "again", tmp_path / "back", layout="diffusers")
    cls = AutoencoderKLFlux2 if config.statistics else AutoencoderKL
    loaded = cls.from_pretrained(tmp_path / "back", use_safetensors=True)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_sizes_are_told_by_tensors_where_the_latents_are_published(tmp_path):
    """Levels, widths and blocks that are not published, under both layouts; groups and units are those published."""
    fields = {**FLUX2, "latent_channels": 32, "block_out_channels": (32, 64, 96), "layers_per_block": 3}
    levels = {name: fields[name][:3] for name in ("down_block_types", "up_block_types")}
    with torch.device("meta"):
        model = AutoencoderKLFlux2(**{**fields, **levels, "norm_num_groups": 32})
    keys = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    want = read_config({"_class_name": "AutoencoderKLFlux2", **model.config}, {})
    for i, one in enumerate((keys, original(keys, 3, lambda shape: (*shape, 1, 1)))):
        assert plan_conversion(write_hollow(tmp_path / str(i), one, None)).config == want


def test_without_a_config_unknown_units_are_asked_for(tmp_path):
    model, _, config = build("flux1")
    safetensors.torch.save_file(as_original(model, config), tmp_path / "ae.safetensors")
    with pytest.raises(InputError, match=r"scale, shift and norm groups for 4 latent channels: name a config.json"):
        plan_conversion(tmp_path / "ae.safetensors")


def test_configs_are_read_and_written():
    for name in CASES:
        _, saved, config = build(name)
        assert (
            read_config(write_config(config, "diffusers"), {})
            == config
            == read_config(json.loads(json.dumps(saved)), {})
        )
    assert write_config(config, "original") is None
    plain = read_config({"_class_name": "AutoencoderKL"}, {})
    assert (plain.widths, plain.scale, plain.shift, plain.quant) == ((64,), 0.18215, 0.0, True)
    assert read_config({"_class_name": "AutoencoderKLFlux2"}, {}) == image_vae.PRESETS["flux2-vae"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(latent_channels="16"), "latent_channels='16' is not a whole number"),
        (dict(block_out_channels=[16, 2.5]), "block_out_channels=.* is not a list of whole numbers"),
        (dict(block_out_channels=3), "block_out_channels=3 is not a list"),
        (dict(scaling_factor="x"), "scaling_factor='x' is not a number"),
        (dict(use_quant_conv=1), "use_quant_conv=1 is not true or false"),
        (dict(out_channels=1), "out_channels=1 are not in_channels=3"),
        (dict(act_fn="gelu"), "act_fn='gelu' is not supported"),
        (dict(down_block_types=["AttnDownEncoderBlock2D"]), "down_block_types=.* is not supported"),
        (dict(latents_mean=[0.0]), "latents_mean is not supported"),
        (dict(patch_size=[2, 1]), r"patch_size=\[2, 1\] is not supported"),
        (dict(norm_num_groups=7), "do not divide by groups=7"),
    ],
)
def test_what_the_autoencoder_does_not_do_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        read_config({"_class_name": "AutoencoderKL", **FLUX1, **change}, {})


def test_no_leaf_is_without_a_rule():
    family, leaves = rules_of("image-vae"), set(layout.named(image_vae.declare(image_vae.PRESETS["flux2-vae"])))
    for each in family.layouts[:2]:
        assert leaves <= {rule.target for rule in family.rules_in(each)}
