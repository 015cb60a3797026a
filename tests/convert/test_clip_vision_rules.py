"""The CLIP image encoder: published tensor lists matched one to one in every layout, tiny models there and back."""

import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from hollow import write_hollow
from tiny_models import bits, files
from torch_clip import CASES, build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import rules_of
from shardzoo.convert.families.clip_vision import read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import clip_vision, layout
from shardzoo.zoo.mesh import make_mesh

PRESET = clip_vision.PRESETS["vit-h-14"]
JSON = write_config(PRESET, "transformers")
WAN = {  # name in transformers -> name in the Wan2.1 repository
    "embeddings.class_embedding": "cls_embedding",
    "embeddings.position_embedding.weight": "pos_embedding",
    "embeddings.patch_embedding": "patch_embedding",
    "pre_layrnorm": "pre_norm",
    "post_layernorm": "post_norm",
    "encoder.layers": "transformer",
    "layer_norm": "norm",
    "self_attn.out_proj": "attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}


def as_wan(state, join, lead):
    """Names of the Wan2.1 repository; `join` packs q, k and v, `lead(value, n)` adds leading dims of 1."""
    found = {}
    for key, value in state.items():
        if "k_proj" in key or "v_proj" in key:
            continue
        if "q_proj" in key:
            value = join([state[key.replace("q_proj", f"{n}_proj")] for n in "qkv"])
        key = key.replace("self_attn.q_proj", "attn.to_qkv")
        for ours, theirs in WAN.items():
            key = key.replace(ours, theirs)
        found[f"visual.{key}"] = lead(value, {"cls_embedding": 2, "pos_embedding": 1}.get(key, 0))
    return found


def tower_keys(c):
    """Names and shapes that transformers gives the tower, without a prefix."""
    norm = {"weight": (c.embed,), "bias": (c.embed,)}
    keys = {
        "embeddings.class_embedding": (c.embed,),
        "embeddings.patch_embedding.weight": (c.embed, c.channels, c.patch, c.patch),
        "embeddings.position_embedding.weight": (c.tokens, c.embed),
    }
    keys |= {f"{name}.{k}": v for name in ("pre_layrnorm", "post_layernorm") for k, v in norm.items()}
    square = {"weight": (c.embed, c.embed), "bias": (c.embed,)}
    each = {f"self_attn.{n}_proj": square for n in ("q", "k", "v", "out")}
    each |= {"layer_norm1": norm, "layer_norm2": norm}
    each |= {"mlp.fc1": {"weight": (c.mlp, c.embed), "bias": (c.mlp,)}}
    each |= {"mlp.fc2": {"weight": (c.embed, c.mlp), "bias": (c.embed,)}}
    layers = range(c.layers)
    return keys | {
        f"encoder.layers.{i}.{n}.{k}": v for i in layers for n, kinds in each.items() for k, v in kinds.items()
    }


KEYS = tower_keys(PRESET)
PREFIXED = {f"vision_model.{key}": shape for key, shape in KEYS.items()}
OF_A_WHOLE_CLIP = {
    "vision_model.embeddings.position_ids": (1, 257),
    "text_model.embeddings.token_embedding.weight": (49408, 1024),
    "text_model.encoder.layers.0.self_attn.q_proj.weight": (1024, 1024),
    "text_projection.weight": (1024, 1024),
    "visual_projection.weight": (1024, 1280),
    "logit_scale": (),
}
WAN_KEYS = as_wan(KEYS, lambda parts: (3 * parts[0][0], *parts[0][1:]), lambda shape, ones: (*(1,) * ones, *shape))
OF_WANS_CLIP = {"textual.token_embedding.weight": (250002, 1024), "visual.head": (1280, 1024), "log_scale": ()}


def test_the_lists_are_those_published():
    assert len(KEYS) == 519 and sum(map(math.prod, KEYS.values())) == 630_766_080
    assert len(WAN_KEYS) == 391 and sum(map(math.prod, WAN_KEYS.values())) == 630_766_080
    assert WAN_KEYS["visual.transformer.31.attn.to_qkv.weight"] == (3840, 1280)
    assert WAN_KEYS["visual.cls_embedding"] == (1, 1, 1280) and WAN_KEYS["visual.pos_embedding"] == (1, 257, 1280)


@pytest.mark.parametrize(
    ("keys", "config", "layout_name", "carried"),
    [
        (KEYS, JSON, "transformers, no prefix", set()),
        (PREFIXED, JSON, "transformers", set()),
        (PREFIXED, None, "transformers", set()),
        (PREFIXED | OF_A_WHOLE_CLIP, {"model_type": "clip", "vision_config": JSON}, "transformers", {*OF_A_WHOLE_CLIP}),
        (WAN_KEYS, None, "original", set()),
        (WAN_KEYS | OF_WANS_CLIP, None, "original", {*OF_WANS_CLIP}),
    ],
)
def test_published_files_match_one_to_one(tmp_path, keys, config, layout_name, carried):
    plan = plan_conversion(write_hollow(tmp_path, keys, config))
    assert (plan.family, plan.layout, plan.config) == ("clip-vision", layout_name, PRESET)
    assert set(plan.carried) == carried
    pieces = [p.source for path, leaf in plan.leaves.items() if not path.startswith("carried") for p in leaf.pieces]
    assert len(pieces) == len(set(pieces)) and sorted([*pieces, *carried]) == sorted(keys)


def test_of_a_whole_clip_the_other_parts_can_be_left_out(tmp_path):
    folder = write_hollow(tmp_path, WAN_KEYS | OF_WANS_CLIP, None)
    plan = plan_conversion(folder, component="image_encoder")
    assert set(plan.skipped) == set(OF_WANS_CLIP) and not plan.carried


def assert_values(checkpoint, model, config):
    want = values(arrays(model), config)
    live = checkpoints.restore(checkpoint, make_mesh(), family="clip-vision")
    got = layout.named(live)
    assert live.config == config and got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[path]), value, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_transformers_there_and_back(tmp_path, name):
    model, config = build(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


def test_a_whole_clip_there_and_back(tmp_path):
    sizes, config = CASES["quick gelu"]
    text = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        max_position_embeddings=9,
    )  # fmt: skip
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=sizes, projection_dim=12))
    model.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model.vision_model, config)
    assert report.carried and all(k.startswith(("text_", "visual_projection", "logit_scale")) for k in report.carried)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


def wan_file(folder, model):
    """A .pth as Wan2.1 has it, with something of the parts that are not run, and the config that tells the rest."""
    state = as_wan(dict(model.state_dict()), torch.cat, lambda value, ones: value.reshape(*(1,) * ones, *value.shape))
    state |= {"visual.head": torch.randn(8, 4), "textual.norm.weight": torch.randn(5), "log_scale": torch.tensor(2.5)}
    state = {key: value.half().clone() for key, value in state.items()}
    folder.mkdir()
    torch.save(state, folder / "models_clip.pth")
    return folder / "models_clip.pth", state


@pytest.mark.parametrize("name", CASES)
def test_a_pth_of_wan_there_and_back(tmp_path, name):
    model, config = build(name)
    model = model.half().float()
    source, state = wan_file(tmp_path / "source", model)
    (tmp_path / "clip.json").write_text(json.dumps(write_config(config, "transformers")))
    report = convert(source, tmp_path / "ckpt", config=tmp_path / "clip.json", sync=False)
    assert set(report.carried) == {"visual.head", "textual.norm.weight", "log_scale"}
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    got = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
    assert got.keys() == state.keys()
    for key, value in state.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(bits(got[key]), bits(value))


def test_sizes_of_no_preset_need_a_config(tmp_path):
    source, _ = wan_file(tmp_path / "source", build("quick gelu")[0])
    with pytest.raises(InputError, match=r"embed=40, mlp=37, layers=4(.|\n)*heads and activation(.|\n)*config="):
        plan_conversion(source)
    gone = {key: shape for key, shape in WAN_KEYS.items() if "pos_embedding" not in key}
    with pytest.raises(InputError, match="positions"):
        plan_conversion(write_hollow(tmp_path / "gone", gone, None))


def test_configs_are_read_as_transformers_writes_them():
    for sizes, config in CASES.values():
        theirs = transformers.CLIPVisionConfig(**sizes).to_dict()
        assert read_config(theirs, {}) == config == read_config(write_config(config, "transformers"), {})
        assert read_config({"model_type": "clip", "vision_config": theirs}, {}) == config
    plain = read_config({"model_type": "clip_vision_model"}, {})
    default = transformers.CLIPVisionConfig()
    assert (plain.embed, plain.layers, plain.patch, plain.activation) == (768, 12, 32, default.hidden_act)
    assert write_config(PRESET, "original") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "silu"}, ["hidden_act='silu'", "quick_gelu"]),
        ({"hidden_size": "1280", "patch_size": [14, 14]}, ["hidden_size='1280'", "patch_size=[14, 14]"]),
        ({"num_attention_heads": 7}, ["embed=1280 does not divide by heads=7"]),
        ({"layer_norm_eps": "small"}, ["layer_norm_eps='small'"]),
        ({"model_type": "clip"}, ["vision_config"]),
    ],
)
def test_what_the_encoder_does_not_do_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        read_config({**JSON, **change}, {})
    assert all(word in str(error.value) for word in words)


def test_no_rule_is_without_a_leaf():
    family, leaves = rules_of("clip-vision"), set(layout.named(clip_vision.declare(PRESET)))
    for each in family.layouts:
        assert {rule.target for rule in family.rules_in(each)} == leaves
