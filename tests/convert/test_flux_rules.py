"""The FLUX.1 family: published tensor lists in both layouts matched, configs and sizes read, bits kept."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from hollow import write_hollow
from torch_flux import SIZES, build, values
from torch_values import arrays
from weight_files import both_layouts_come_back, each_is_written_from_the_other, taken_once, write

from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.families.flux import FAMILY, read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import flux

# name -> tensors and parameters, as published, in the layout of diffusers
PUBLISHED = {"flux1-dev": (1160, 11_901_408_320), "flux1-schnell": (1156, 11_891_178_560)}


def diffusers_keys(config):
    """Keys and shapes of the class itself, without memory for its weights."""
    with torch.device("meta"):
        saved = {k: v for k, v in write_config(config, "diffusers").items() if k != "_class_name"}
        return {k: tuple(v.shape) for k, v in FluxTransformer2DModel(**saved).state_dict().items()}


def original_keys(c):
    """Keys and shapes as the original names and packs them, written down here and not taken from the rules."""
    e, keys = c.embed, {}

    def linear(name, out, size):
        keys.update({f"{name}.weight": (out, size), f"{name}.bias": (out,)})

    linear("img_in", e, c.in_channels)
    linear("txt_in", e, c.text)
    for name, size in (("time_in", 256), ("vector_in", c.pooled), *([("guidance_in", 256)] if c.guidance else [])):
        linear(f"{name}.in_layer", e, size)
        linear(f"{name}.out_layer", e, e)
    for i in range(c.double_layers):
        for name in ("img", "txt"):
            block = f"double_blocks.{i}.{name}"
            linear(f"{block}_mod.lin", 6 * e, e)
            linear(f"{block}_attn.qkv", 3 * e, e)
            linear(f"{block}_attn.proj", e, e)
            linear(f"{block}_mlp.0", c.mlp, e)
            linear(f"{block}_mlp.2", e, c.mlp)
            keys |= {f"{block}_attn.norm.{x}_norm.scale": (c.head_dim,) for x in ("query", "key")}
    for i in range(c.single_layers):
        block = f"single_blocks.{i}"
        linear(f"{block}.linear1", 3 * e + c.mlp, e)
        linear(f"{block}.linear2", e, e + c.mlp)
        linear(f"{block}.modulation.lin", 3 * e, e)
        keys |= {f"{block}.norm.{x}_norm.scale": (c.head_dim,) for x in ("query", "key")}
    linear("final_layer.adaLN_modulation.1", 2 * e, e)
    linear("final_layer.linear", c.out_channels, e)
    return keys


def as_original(tensors, config):
    """The tensors of diffusers' layout named and packed as the original does, by hand."""
    t, made = dict(tensors), {}

    def move(theirs, ours):
        made.update({f"{ours}.{kind}": t.pop(f"{theirs}.{kind}") for kind in ("weight", "bias")})

    def join(theirs, ours, axis=0):
        made.update({f"{ours}.{k}": np.concatenate([t.pop(f"{x}.{k}") for x in theirs], 0) for k in ("weight", "bias")})

    move("x_embedder", "img_in")
    move("context_embedder", "txt_in")
    names = {"timestep": "time_in", "guidance": "guidance_in", "text": "vector_in"}
    for theirs, ours in names.items():
        if f"time_text_embed.{theirs}_embedder.linear_1.weight" in t:
            move(f"time_text_embed.{theirs}_embedder.linear_1", f"{ours}.in_layer")
            move(f"time_text_embed.{theirs}_embedder.linear_2", f"{ours}.out_layer")
    for i in range(config.double_layers):
        a, b = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for norm, qkv, added, out, ff, name in (
            ("norm1", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff", "img"),
            ("norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "added_", "to_add_out", "ff_context", "txt"),
        ):
            move(f"{a}.{norm}.linear", f"{b}.{name}_mod.lin")
            join([f"{a}.attn.{x}" for x in qkv], f"{b}.{name}_attn.qkv")
            made[f"{b}.{name}_attn.norm.query_norm.scale"] = t.pop(f"{a}.attn.norm_{added}q.weight")
            made[f"{b}.{name}_attn.norm.key_norm.scale"] = t.pop(f"{a}.attn.norm_{added}k.weight")
            move(f"{a}.attn.{out}", f"{b}.{name}_attn.proj")
            move(f"{a}.{ff}.net.0.proj", f"{b}.{name}_mlp.0")
            move(f"{a}.{ff}.net.2", f"{b}.{name}_mlp.2")
    for i in range(config.single_layers):
        a, b = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        move(f"{a}.norm.linear", f"{b}.modulation.lin")
        join([*(f"{a}.attn.to_{x}" for x in "qkv"), f"{a}.proj_mlp"], f"{b}.linear1")
        made[f"{b}.norm.query_norm.scale"] = t.pop(f"{a}.attn.norm_q.weight")
        made[f"{b}.norm.key_norm.scale"] = t.pop(f"{a}.attn.norm_k.weight")
        move(f"{a}.proj_out", f"{b}.linear2")
    scale, shift = (np.split(t.pop(f"norm_out.linear.{kind}"), 2) for kind in ("weight", "bias"))
    made["final_layer.adaLN_modulation.1.weight"] = np.concatenate(scale[::-1])
    made["final_layer.adaLN_modulation.1.bias"] = np.concatenate(shift[::-1])
    move("proj_out", "final_layer.linear")
    assert not t
    return made


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched(tmp_path, name, layout):
    config = flux.PRESETS[name]
    keys = diffusers_keys(config) if layout == "diffusers" else original_keys(config)
    count, parameters = PUBLISHED[name]
    assert sum(map(math.prod, keys.values())) == parameters and (layout == "original" or len(keys) == count)
    plan = plan_conversion(write_hollow(tmp_path, keys, write_config(config, layout)))
    assert (plan.layout, plan.config) == (layout, config) and not plan.carried and not plan.skipped
    taken_once(plan, keys)


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "schnell"])
def tiny(request):
    model, saved, config = build(guidance_embeds=request.param)
    named = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    return named, {"_class_name": "FluxTransformer2DModel", **saved}, config


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


def test_tensors_that_do_not_tell_the_sizes_are_refused(tmp_path, tiny):
    named, _, config = tiny
    with pytest.raises(InputError, match=r"heads do not tell \(heads are 128 wide(.|\n)*--config"):
        convert(write(tmp_path / "original", as_original(named, config)), tmp_path / "a")
    with pytest.raises(InputError, match=r"image, text, pooled, mlp, out, norm do not tell"):
        FAMILY.read_config({}, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "19"}, "num_layers='19'"),
        ({"patch_size": 2}, "patch_size=2 is not supported"),
        ({"axes_dims_rope": [16, "x", 56]}, "axes_dims_rope"),
        ({"axes_dims_rope": [16, 16, 16]}, "48 dims in all"),
        ({"guidance_embeds": 1}, "guidance_embeds=1"),
    ],
)
def test_what_is_not_done_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        read_config({"_class_name": "FluxTransformer2DModel", **SIZES, **change}, {})
