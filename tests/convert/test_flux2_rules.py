"""The FLUX.2 family: published tensor lists in both layouts matched, configs and sizes read, bits kept."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import Flux2Transformer2DModel
from hollow import write_hollow
from torch_flux2 import SIZES, build, values
from torch_values import arrays
from weight_files import both_layouts_come_back, each_is_written_from_the_other, taken_once, write

from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.families.flux2 import FAMILY, read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import flux2

# name -> tensors and parameters, as published, in the layout of diffusers
PUBLISHED = {
    "flux2-dev": (331, 32_223_281_152),
    "flux2-klein-4b": (169, 3_875_544_576),
    "flux2-klein-9b": (233, 9_078_581_248),
}


def diffusers_keys(config):
    """Keys and shapes of the class itself, without memory for its weights."""
    with torch.device("meta"):
        saved = {k: v for k, v in write_config(config, "diffusers").items() if k != "_class_name"}
        return {k: tuple(v.shape) for k, v in Flux2Transformer2DModel(**saved).state_dict().items()}


def original_keys(c):
    """Keys and shapes as the original names and packs them, written down here and not taken from the rules."""
    e, keys = c.embed, {}

    def linear(name, out, size):
        keys[f"{name}.weight"] = (out, size)

    linear("img_in", e, c.in_channels)
    linear("txt_in", e, c.text)
    for name in ("time_in", *(["guidance_in"] if c.guidance else [])):
        linear(f"{name}.in_layer", e, c.freq)
        linear(f"{name}.out_layer", e, e)
    for name, rows in (
        ("double_stream_modulation_img", 6),
        ("double_stream_modulation_txt", 6),
        ("single_stream_modulation", 3),
    ):
        linear(f"{name}.lin", rows * e, e)
    for i in range(c.double_layers):
        for name in ("img", "txt"):
            block = f"double_blocks.{i}.{name}"
            linear(f"{block}_attn.qkv", 3 * e, e)
            linear(f"{block}_attn.proj", e, e)
            linear(f"{block}_mlp.0", 2 * c.mlp, e)
            linear(f"{block}_mlp.2", e, c.mlp)
            keys |= {f"{block}_attn.norm.{x}_norm.scale": (c.head_dim,) for x in ("query", "key")}
    for i in range(c.single_layers):
        block = f"single_blocks.{i}"
        linear(f"{block}.linear1", 3 * e + 2 * c.mlp, e)
        linear(f"{block}.linear2", e, e + c.mlp)
        keys |= {f"{block}.norm.{x}_norm.scale": (c.head_dim,) for x in ("query", "key")}
    linear("final_layer.adaLN_modulation.1", 2 * e, e)
    linear("final_layer.linear", c.out_channels, e)
    return keys


def as_original(tensors, config):
    """The tensors of diffusers' layout named and packed as the original does, by hand."""
    t, made = dict(tensors), {}

    def move(theirs, ours):
        made[f"{ours}.weight"] = t.pop(f"{theirs}.weight")

    move("x_embedder", "img_in")
    move("context_embedder", "txt_in")
    for theirs, ours in (("timestep", "time_in"), ("guidance", "guidance_in")):
        if f"time_guidance_embed.{theirs}_embedder.linear_1.weight" in t:
            move(f"time_guidance_embed.{theirs}_embedder.linear_1", f"{ours}.in_layer")
            move(f"time_guidance_embed.{theirs}_embedder.linear_2", f"{ours}.out_layer")
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        move(f"{name}.linear", f"{name}.lin")
    for i in range(config.double_layers):
        a, b = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for qkv, added, out, ff, name in (
            (("to_q", "to_k", "to_v"), "", "to_out.0", "ff", "img"),
            (("add_q_proj", "add_k_proj", "add_v_proj"), "added_", "to_add_out", "ff_context", "txt"),
        ):
            made[f"{b}.{name}_attn.qkv.weight"] = np.concatenate([t.pop(f"{a}.attn.{x}.weight") for x in qkv])
            made[f"{b}.{name}_attn.norm.query_norm.scale"] = t.pop(f"{a}.attn.norm_{added}q.weight")
            made[f"{b}.{name}_attn.norm.key_norm.scale"] = t.pop(f"{a}.attn.norm_{added}k.weight")
            move(f"{a}.attn.{out}", f"{b}.{name}_attn.proj")
            move(f"{a}.{ff}.linear_in", f"{b}.{name}_mlp.0")
            move(f"{a}.{ff}.linear_out", f"{b}.{name}_mlp.2")
    for i in range(config.single_layers):
        a, b = f"single_transformer_blocks.{i}.attn", f"single_blocks.{i}"
        move(f"{a}.to_qkv_mlp_proj", f"{b}.linear1")
        move(f"{a}.to_out", f"{b}.linear2")
        made[f"{b}.norm.query_norm.scale"] = t.pop(f"{a}.norm_q.weight")
        made[f"{b}.norm.key_norm.scale"] = t.pop(f"{a}.norm_k.weight")
    scale, shift = np.split(t.pop("norm_out.linear.weight"), 2)
    made["final_layer.adaLN_modulation.1.weight"] = np.concatenate([shift, scale])
    move("proj_out", "final_layer.linear")
    assert not t
    return made


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched(tmp_path, name, layout):
    config = flux2.PRESETS[name]
    keys = diffusers_keys(config) if layout == "diffusers" else original_keys(config)
    count, parameters = PUBLISHED[name]
    assert sum(map(math.prod, keys.values())) == parameters and (layout == "original" or len(keys) == count)
    plan = plan_conversion(write_hollow(tmp_path, keys, write_config(config, layout)))
    assert (plan.layout, plan.config) == (layout, config) and not plan.carried and not plan.skipped
    taken_once(plan, keys)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_single_files_with_a_prefix_tell_their_sizes(tmp_path, prefix):
    config = flux2.PRESETS["flux2-klein-4b"]
    keys = {prefix + key: shape for key, shape in original_keys(config).items()}
    plan = plan_conversion(write_hollow(tmp_path, keys, None))
    assert (plan.family, plan.layout, plan.config) == ("flux2", "original", config)


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "klein"])
def tiny(request):
    model, saved, config = build(guidance_embeds=request.param)
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    return named, {"_class_name": "Flux2Transformer2DModel", **saved}, config


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_both_layouts_are_one_model_and_come_back_bit_for_bit(tmp_path, tiny, prefix):
    named, saved, config = tiny
    original = {prefix + k: v for k, v in as_original(named, config).items()}
    want = values({k: v.astype(np.float32) for k, v in named.items()}, config)
    both_layouts_come_back(tmp_path, write(tmp_path / "diffusers", named, saved), original, want, config)


def test_each_layout_is_written_from_the_other(tmp_path, tiny):
    named, saved, config = tiny
    source = write(tmp_path / "diffusers", named, saved)
    original, its_config = as_original(named, config), source / "config.json"
    again = each_is_written_from_the_other(tmp_path, source, original, "original", config=its_config)
    assert read_config(json.loads((again / "config.json").read_text()), {}) == config


@pytest.mark.parametrize("embed, mlp", [(64, 192), (66, 164), (49, 100), (3072, 9216)])
def test_the_ratio_of_a_config_gives_the_width_back(embed, mlp):
    config = flux2.Config(heads=1, head_dim=embed * 2, mlp=mlp, axes=(embed * 2,))
    assert read_config(write_config(config, "diffusers"), {}) == config


def test_tensors_that_do_not_tell_the_sizes_are_refused(tmp_path, tiny):
    named, _, config = tiny
    with pytest.raises(InputError, match=r"heads do not tell \(heads are 128 wide(.|\n)*--config"):
        convert(write(tmp_path / "original", as_original(named, config)), tmp_path / "a")
    with pytest.raises(InputError, match=r"image, text, freq, mlp, out, norm do not tell"):
        FAMILY.read_config({}, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "8"}, "num_layers='8'"),
        ({"patch_size": 2}, "patch_size=2 is not supported"),
        ({"mlp_ratio": 0}, "mlp_ratio=0 is not a number above 0"),
        ({"axes_dims_rope": [16, "x", 56]}, "axes_dims_rope"),
        ({"axes_dims_rope": [16, 16, 16]}, "48 dims in all"),
        ({"guidance_embeds": 1}, "guidance_embeds=1"),
    ],
)
def test_what_is_not_done_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        read_config({"_class_name": "Flux2Transformer2DModel", **SIZES, **change}, {})
