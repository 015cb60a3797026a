"""The CLIP text encoder: published tensor lists matched one to one under every prefix, tiny models there and back."""

import json
import math

import numpy as np
import pytest
import safetensors.torch
import transformers
from hollow import write_hollow
from tiny_models import bits, files
from torch_clip_text import CASES, build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import rules_of
from shardzoo.convert.families.clip_text import read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import clip_text, layout
from shardzoo.zoo.mesh import make_mesh

PRESET = clip_text.PRESETS["clip-l"]
JSON = write_config(PRESET, "transformers")


def tower_keys(c):
    """Names and shapes that transformers gives the tower, without a prefix."""
    norm = {"weight": (c.embed,), "bias": (c.embed,)}
    keys = {
        "embeddings.token_embedding.weight": (c.vocab, c.embed),
        "embeddings.position_embedding.weight": (c.positions, c.embed),
    }
    keys |= {f"final_layer_norm.{kind}": shape for kind, shape in norm.items()}
    square = {"weight": (c.embed, c.embed), "bias": (c.embed,)}
    each = {f"self_attn.{n}_proj": square for n in ("q", "k", "v", "out")}
    each |= {"layer_norm1": norm, "layer_norm2": norm}
    each |= {"mlp.fc1": {"weight": (c.mlp, c.embed), "bias": (c.mlp,)}}
    each |= {"mlp.fc2": {"weight": (c.embed, c.mlp), "bias": (c.embed,)}}
    layers = range(c.layers)
    return keys | {
        f"encoder.layers.{i}.{n}.{k}": v for i in layers for n, kinds in each.items() for k, v in kinds.items()
    }


def under(prefix, keys):
    return {f"{prefix}{key}": shape for key, shape in keys.items()}


KEYS = tower_keys(PRESET)
PREFIXED = under("text_model.", KEYS)
COMFY = under("text_encoders.clip_l.transformer.", PREFIXED)
OF_A_WHOLE_CLIP = {
    "text_model.embeddings.position_ids": (1, 77),
    "vision_model.embeddings.class_embedding": (1024,),
    "vision_model.encoder.layers.0.self_attn.q_proj.weight": (1024, 1024),
    "text_projection.weight": (768, 768),
    "visual_projection.weight": (768, 1024),
    "logit_scale": (),
}


def test_the_list_is_that_published():
    assert len(KEYS) == 196 and sum(map(math.prod, KEYS.values())) == 123_060_480


@pytest.mark.parametrize(
    ("keys", "config", "family", "layout_name", "carried"),
    [
        (KEYS, JSON, None, "transformers, no prefix", set()),
        (KEYS, None, None, "transformers, no prefix", set()),
        (PREFIXED, JSON, None, "transformers", set()),
        (PREFIXED, None, None, "transformers", set()),
        (COMFY, None, None, "transformers", set()),
        (PREFIXED | {"text_projection.weight": (768, 768)}, None, None, "transformers", {"text_projection.weight"}),
        (
            PREFIXED | OF_A_WHOLE_CLIP,
            {"model_type": "clip", "text_config": JSON},
            "clip-text",
            "transformers",
            {*OF_A_WHOLE_CLIP},
        ),
    ],
)
def test_published_files_match_one_to_one(tmp_path, keys, config, family, layout_name, carried):
    plan = plan_conversion(write_hollow(tmp_path, keys, config), family=family)
    assert (plan.family, plan.layout, plan.config) == ("clip-text", layout_name, PRESET)
    assert set(plan.carried) == carried
    pieces = [p.source for path, leaf in plan.leaves.items() if not path.startswith("carried") for p in leaf.pieces]
    assert len(pieces) == len(set(pieces)) and sorted([*pieces, *carried]) == sorted(keys)


def assert_values(checkpoint, model, config):
    want = values(arrays(model), config)
    live = checkpoints.restore(checkpoint, make_mesh(), family="clip-text")
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


@pytest.mark.parametrize("prefix", ["", "text_encoders.clip_l.transformer."])
def test_a_single_file_there_and_back(tmp_path, prefix):
    """In half precision, with a projection that is only carried, and a config that tells the rest."""
    model, config = build("ends at the highest id")
    model = model.half()
    state = {f"{prefix}text_model.{key}": value.clone() for key, value in model.state_dict().items()}
    state[f"{prefix}text_projection.weight"] = state[f"{prefix}text_model.final_layer_norm.weight"].clone()
    safetensors.torch.save_file(state, tmp_path / "clip_l.safetensors")
    (tmp_path / "clip.json").write_text(json.dumps(write_config(config, "transformers")))
    convert(tmp_path / "clip_l.safetensors", tmp_path / "ckpt", config=tmp_path / "clip.json", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    got = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
    assert got.keys() == state.keys()
    for key, value in state.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(bits(got[key]), bits(value))


def test_a_whole_clip_there_and_back(tmp_path):
    sizes, config = CASES["ends at the highest id"]
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=vision, projection_dim=12))
    model.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "ckpt", family="clip-text", sync=False)
    assert_values(tmp_path / "ckpt", model.text_model, config)
    assert report.carried and all("text_model" not in key for key in report.carried)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


def test_sizes_of_no_preset_need_a_config(tmp_path):
    keys = under("text_model.", tower_keys(CASES["published tiny"][1]))
    with pytest.raises(
        InputError, match=r"vocab=120, embed=32(.|\n)*heads, activation and the end token(.|\n)*config="
    ):
        plan_conversion(write_hollow(tmp_path / "tiny", keys, None))
    gone = {key: shape for key, shape in PREFIXED.items() if "position" not in key}
    with pytest.raises(InputError, match="position_embedding"):
        plan_conversion(write_hollow(tmp_path / "gone", gone, None))


def test_configs_are_read_as_transformers_writes_them():
    for sizes, config in CASES.values():
        theirs = transformers.CLIPTextConfig(**sizes).to_dict()
        assert read_config(theirs, {}) == config == read_config(write_config(config, "transformers"), {})
        assert read_config({"model_type": "clip", "text_config": theirs}, {}) == config
    plain = read_config({"model_type": "clip_text_model"}, {})
    assert plain == read_config(transformers.CLIPTextConfig().to_dict(), {})
    assert (plain.embed, plain.heads, plain.end_token) == (512, 8, 49407)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "silu"}, ["hidden_act='silu'", "quick_gelu"]),
        ({"hidden_size": "768", "vocab_size": 0}, ["hidden_size='768'", "vocab_size=0"]),
        ({"num_attention_heads": 7}, ["embed=768 does not divide by heads=7"]),
        ({"eos_token_id": [2, 3]}, ["eos_token_id=[2, 3]"]),
        ({"model_type": "clip"}, ["text_config"]),
    ],
)
def test_what_the_encoder_does_not_do_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        read_config({**JSON, **change}, {})
    assert all(word in str(error.value) for word in words)


def test_no_rule_is_without_a_leaf():
    family, leaves = rules_of("clip-text"), set(layout.named(clip_text.declare(PRESET)))
    for each in family.layouts:
        assert {rule.target for rule in family.rules_in(each)} == leaves
