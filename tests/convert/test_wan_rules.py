"""The Wan family: published tensor lists in both layouts matched one to one, configs and sizes read, bits kept."""

import collections
import json
import math

import numpy as np
import pytest
from hollow import write_hollow
from safetensors.numpy import load_file, save_file
from torch_values import arrays
from torch_wan import IMAGE, build

from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.wan import FAMILY, read_config, write_config
from shardzoo.convert.rules import gaps
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError
from shardzoo.zoo import layout as zoo_layout
from shardzoo.zoo import wan

# name -> (tensors, parameters) as published
PUBLISHED = {
    "wan2.1-t2v-1.3b": (825, 1_418_996_800),
    "wan2.1-t2v-14b": (1095, 14_288_491_584),
    "wan2.1-i2v-14b": (1303, 16_394_878_784),
    "wan2.1-flf2v-14b": (1304, 16_395_536_704),
    "wan2.2-ti2v-5b": (825, 4_999_787_712),
    "wan2.2-t2v-a14b": (1095, 14_288_491_584),
    "wan2.2-i2v-a14b": (1095, 14_288_901_184),
}


def original_keys(c):
    """Keys and shapes as the Wan repositories name them, written down here and not taken from the rules."""
    e = c.embed
    keys = {"patch_embedding.weight": (e, c.in_channels, *c.patch), "patch_embedding.bias": (e,)}

    def linear(name, out, size):
        keys.update({f"{name}.weight": (out, size), f"{name}.bias": (out,)})

    linear("text_embedding.0", e, c.text)
    linear("text_embedding.2", e, e)
    linear("time_embedding.0", e, c.freq)
    linear("time_embedding.2", e, e)
    linear("time_projection.1", 6 * e, e)
    linear("head.head", math.prod(c.patch) * c.out_channels, e)
    keys["head.modulation"] = (1, 2, e)
    if c.image:
        for i, size in ((0, c.image), (4, e)):
            keys |= {f"img_emb.proj.{i}.weight": (size,), f"img_emb.proj.{i}.bias": (size,)}
        linear("img_emb.proj.1", c.image, c.image)
        linear("img_emb.proj.3", e, c.image)
    if c.image_positions:
        keys["img_emb.emb_pos"] = (1, c.image_positions, c.image)
    for i in range(c.layers):
        block = f"blocks.{i}."
        for name in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"{block}{name}.{part}", e, e)
            keys |= {f"{block}{name}.norm_q.weight": (e,), f"{block}{name}.norm_k.weight": (e,)}
        if c.image:
            linear(f"{block}cross_attn.k_img", e, e)
            linear(f"{block}cross_attn.v_img", e, e)
            keys[f"{block}cross_attn.norm_k_img.weight"] = (e,)
        keys |= {f"{block}norm3.weight": (e,), f"{block}norm3.bias": (e,), f"{block}modulation": (1, 6, e)}
        linear(f"{block}ffn.0", c.mlp, e)
        linear(f"{block}ffn.2", e, c.mlp)
    return keys


NAMES = (
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("img_emb.proj.0.", "condition_embedder.image_embedder.norm1."),
    ("img_emb.proj.1.", "condition_embedder.image_embedder.ff.net.0.proj."),
    ("img_emb.proj.3.", "condition_embedder.image_embedder.ff.net.2."),
    ("img_emb.proj.4.", "condition_embedder.image_embedder.norm2."),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("head.head.", "proj_out."),
    ("head.modulation", "scale_shift_table"),
    (".modulation", ".scale_shift_table"),
    ("self_attn.o.", "attn1.to_out.0."),
    ("cross_attn.o.", "attn2.to_out.0."),
    ("cross_attn.k_img.", "attn2.add_k_proj."),
    ("cross_attn.v_img.", "attn2.add_v_proj."),
    ("cross_attn.norm_k_img.", "attn2.norm_added_k."),
    ("self_attn.norm_", "attn1.norm_"),
    ("cross_attn.norm_", "attn2.norm_"),
    ("self_attn.", "attn1.to_"),
    ("cross_attn.", "attn2.to_"),
    ("norm3.", "norm2."),
    ("ffn.0.", "ffn.net.0.proj."),
    ("ffn.2.", "ffn.net.2."),
)


def diffusers_name(key):
    for ours, theirs in NAMES:
        if ours in key:
            return key.replace(ours, theirs)
    return key


def tensors_of(config, layout):
    keys = original_keys(config)
    return keys if layout == "original" else {diffusers_name(key): shape for key, shape in keys.items()}


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched_one_to_one(tmp_path, name, layout):
    config = wan.PRESETS[name]
    keys = tensors_of(config, layout)
    assert (len(keys), sum(map(math.prod, keys.values()))) == PUBLISHED[name]
    plan = plan_conversion(write_hollow(tmp_path, keys, write_config(config, layout)))
    assert (plan.layout, plan.config) == (layout, config)
    pieces = [piece for leaf in plan.leaves.values() for piece in leaf.pieces]
    assert set(collections.Counter(piece.source for piece in pieces).values()) == {1}
    assert {piece.source for piece in pieces} == set(keys) and not plan.carried and not plan.skipped
    for piece in pieces:
        assert piece.take == tuple((0, size) for size in keys[piece.source])
    assert gaps(pieces, zoo_layout.named(plan.declared)) == []


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "model."])
@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "wan2.1-flf2v-14b", "wan2.2-ti2v-5b", "wan2.2-i2v-a14b"])
def test_a_single_file_without_a_config_tells_its_sizes(tmp_path, name, prefix):
    config = wan.PRESETS[name]
    keys = {prefix + key: shape for key, shape in original_keys(config).items()}
    plan = plan_conversion(write_hollow(tmp_path, keys, None), prefix=None if "diffusion" in prefix else prefix)
    assert (plan.layout, plan.prefix, plan.config) == ("original", prefix, config)


def test_norms_that_nothing_reads_are_kept_aside(tmp_path):
    config = wan.PRESETS["wan2.1-i2v-14b"]
    more = {f"blocks.{i}.attn2.norm_added_q.weight": (5120,) for i in range(40)}
    plan = plan_conversion(
        write_hollow(tmp_path, tensors_of(config, "diffusers") | more, write_config(config, "diffusers"))
    )
    assert set(plan.carried) == set(more)


PUBLISHED_ORIGINAL = {
    "_class_name": "WanModel",
    "_diffusers_version": "0.33.0",
    "eps": 1e-6,
    "freq_dim": 256,
    "text_len": 512,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_the_wan_repositories_are_read(name):
    config = wan.PRESETS[name]
    source = {
        **PUBLISHED_ORIGINAL, "model_type": name.split("-")[1], "dim": config.embed, "ffn_dim": config.mlp,
        "in_dim": config.in_channels, "out_dim": config.out_channels, "num_heads": config.heads,
        "num_layers": config.layers,
    }  # fmt: skip
    tensors = {
        key: TensorInfo(key=key, shape=shape, dtype=np.dtype("f4"), file=0, nbytes=0, memory=(), offset=0)
        for key, shape in original_keys(config).items()
    }
    assert read_config(source, tensors) == config
    assert write_config(config, "original").items() >= {k: v for k, v in source.items() if k[0] != "_"}.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "40"}, "num_layers='40'"),
        ({"ffn_dim": 0, "eps": "x"}, "ffn_dim=0(.|\n)*eps='x'"),
        ({"qk_norm": None}, "qk_norm=None"),
        ({"cross_attn_norm": False}, "cross_attn_norm=False"),
        ({"patch_size": [1, 2]}, r"patch_size=\[1, 2\]"),
        ({"image_dim": 1280}, "added_kv_proj_dim=None"),
        ({"image_dim": 1280, "added_kv_proj_dim": 12}, "added_kv_proj_dim=12"),
    ],
)
def test_what_is_not_done_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        read_config(write_config(wan.PRESETS["wan2.1-t2v-14b"], "diffusers") | change, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "vace"}, "'vace'"), ({"num_heads": 7}, "num_heads=7"), ({"window_size": [8, 8]}, "window_size")],
)
def test_original_configs_that_are_not_done_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        read_config(write_config(wan.PRESETS["wan2.1-t2v-14b"], "original") | change, {})


def test_tensors_that_do_not_tell_the_sizes_are_refused():
    with pytest.raises(InputError, match=r"text\.up(.|\n)*config="):
        read_config({}, {})


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("kind", [{}, dict(**IMAGE, pos_embed_seq_len=10)], ids=["t2v", "flf2v"])
def test_tiny_models_come_back_bit_for_bit(tmp_path, layout, kind):
    """Converted from each layout they are the same model; exported they are the file that came in."""
    model, _, config = build(**kind)
    theirs = {diffusers_name(key): key for key in original_keys(config)}
    tensors = {k if layout == "diffusers" else theirs[k]: v for k, v in arrays(model).items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "diffusion_pytorch_model.safetensors")
    (source / "config.json").write_text(json.dumps(write_config(config, layout)))
    convert(source, tmp_path / "checkpoint", sync=False)
    export(tmp_path / "checkpoint", tmp_path / "back")
    [file] = (tmp_path / "back").glob("*.safetensors")
    back = load_file(file)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[key].view(np.uint32), tensors[key].view(np.uint32)) for key in tensors)


def test_no_rule_is_without_a_leaf():
    every = zoo_layout.named(wan.declare(wan.PRESETS["wan2.1-flf2v-14b"]))
    for layout in FAMILY.layouts:
        assert {rule.target for rule in FAMILY.rules_in(layout)} == set(every)
