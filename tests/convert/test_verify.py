"""A checkpoint against its source: equal to the bit, and every difference named with its place."""

import json

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import torch

from shardzoo import checkpoints
from shardzoo.convert.convert import convert
from shardzoo.convert.verify import compare, verify
from shardzoo.errors import InputError


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    source = tiny_models.save("qwen2.5-vl", folder / "source", shard="1GB")
    convert(source, folder / "ckpt", sync=False)
    return source, folder / "ckpt"


@pytest.fixture
def source(converted, tmp_path):
    return tiny_models.copy(converted[0], tmp_path / "source")


def change(source, key, value):
    file = source / "model.safetensors"
    state = safetensors.torch.load_file(file)
    if value is None:
        del state[key]
    else:
        state[key] = value(state[key].clone()) if key in state else value(None)
    safetensors.torch.save_file(state, file)


def test_every_tensor_is_compared_and_equal(converted):
    source, ckpt = converted
    told = []
    report = verify(ckpt, source, progress=lambda *now: told.append(now))
    keys = safetensors.torch.load_file(source / "model.safetensors")
    assert {t.key for t in report.tensors} == set(keys) and report.equal and report.level == "source"
    assert {t.key: t.values for t in report.tensors} == {key: value.numel() for key, value in keys.items()}
    assert report.bytes_compared == sum(value.nbytes for value in keys.values())
    assert told[-1][0] == told[-1][1]
    assert json.loads(json.dumps(report.to_json()))["equal"]


@pytest.mark.parametrize(
    ("key", "path", "index"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "blocks.attn.kv.weight", (1, 1, 1, 2, 7)),
        ("model.layers.2.mlp.up_proj.weight", "blocks.mlp.gate_up.weight", (2, 1, 10, 7)),
        ("model.norm.weight", "norm.weight", (10,)),
        ("visual.blocks.1.attn.qkv.bias", "carried/visual.blocks.1.attn.qkv.bias", (10,)),
    ],
)
def test_one_flipped_bit_in_the_source_is_named_with_its_place(converted, source, key, path, index):
    where = (10, 7) if len(index) > 2 else (10,)

    def flip(tensor):
        tensor.view(torch.int16)[where] ^= 1
        return tensor

    change(source, key, flip)
    report = compare(converted[1], source)
    wrong = [t for t in report.tensors if not t.equal]
    assert [(t.key, t.leaves, t.different, t.first) for t in wrong] == [(key, (path,), 1, index)]
    assert 0 < wrong[0].largest < 0.1
    with pytest.raises(InputError) as error:
        verify(converted[1], source)
    assert f"{key}: 1 of" in str(error.value) and path in str(error.value)


def test_missing_new_and_changed_tensors_are_all_named(converted, source):
    change(source, "model.norm.weight", None)
    change(source, "score.weight", lambda _: torch.zeros(3))
    change(source, "model.layers.0.input_layernorm.weight", lambda t: t.float())
    with pytest.raises(InputError) as error:
        verify(converted[1], source)
    assert "model.norm.weight: is no longer in the source" in str(error.value)
    assert "score.weight: was not there when it was converted" in str(error.value)
    assert "model.layers.0.input_layernorm.weight: is float32[32] now, was bfloat16[32]" in str(error.value)


def test_negative_zero_and_the_bits_of_nan_count(converted, source, tmp_path):
    def special(tensor):
        tensor.view(torch.int16)[:2] = torch.tensor([0x7FC1, -0x8000], dtype=torch.int16)
        return tensor

    change(source, "model.norm.weight", special)
    convert(source, tmp_path / "ckpt", sync=False)
    assert compare(tmp_path / "ckpt", source).equal

    def other(tensor):
        tensor.view(torch.int16)[:2] = torch.tensor([0x7FC2, 0], dtype=torch.int16)
        return tensor

    change(source, "model.norm.weight", other)
    wrong = [t for t in compare(tmp_path / "ckpt", source).tensors if not t.equal]
    assert [(t.key, t.different) for t in wrong] == [("model.norm.weight", 2)]


def test_a_cast_is_compared_after_the_cast(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source", torch.float32)
    convert(source, tmp_path / "ckpt", dtype="bf16", sync=False)
    report = compare(tmp_path / "ckpt", source)
    assert report.equal and report.cast == "bfloat16"


def test_tied_and_left_out_tensors(tmp_path):
    tied = tiny_models.save_bin("llama-tied", tmp_path / "tied")
    convert(tied, tmp_path / "ckpt", sync=False)
    report = compare(tmp_path / "ckpt", tied)
    assert report.equal and next(t for t in report.tensors if t.key == "lm_head.weight").leaves == ("embed.weight",)
    source = tiny_models.save("mistral3", tmp_path / "source")
    convert(source, tmp_path / "text", component="language_model", sync=False)
    assert checkpoints.open(tmp_path / "text").manifest.header.component == "language_model"
    report = compare(tmp_path / "text", source)
    assert report.equal and not any("vision" in t.key for t in report.tensors)


def test_a_damaged_checkpoint_is_named_without_a_source(converted, tmp_path):
    ckpt = tiny_models.copy(converted[1], tmp_path / "ckpt")
    assert verify(ckpt).level == "full" and verify(ckpt, level="quick").bytes_compared > 0
    tiny_models.flip_bit(ckpt, "blocks.attn.q.weight")
    with pytest.raises(InputError, match=r"blocks\.attn\.q\.weight"):
        verify(ckpt)
    with pytest.raises(InputError, match=r"blocks\.attn\.q\.weight"):
        verify(ckpt, converted[0])


def test_values_are_counted_right_over_many_files(tmp_path):
    """A leaf in several files, with differences in more than one."""
    source = tmp_path / "source"
    source.mkdir()
    sizes = {"vocab_size": 20480, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8}
    (source / "config.json").write_text(json.dumps({**config, **sizes, "tie_word_embeddings": True}))
    block = "model.layers.0."
    shapes = {f"{block}self_attn.{n}_proj.weight": (512, 512) for n in "qkvo"}
    shapes |= {f"{block}mlp.{n}_proj.weight": (64, 512) for n in ("gate", "up")}
    shapes |= {f"{block}mlp.down_proj.weight": (512, 64), "model.norm.weight": (512,)}
    shapes |= {f"{block}{n}_layernorm.weight": (512,) for n in ("input", "post_attention")}
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    state["model.embed_tokens.weight"] = torch.arange(20480 * 512, dtype=torch.float32).reshape(20480, 512)
    safetensors.torch.save_file(state, source / "model.safetensors")
    convert(source, tmp_path / "ckpt", sync=False)
    rows = np.array([20000, 3, 9000])
    change(
        source,
        "model.embed_tokens.weight",
        lambda t: t.index_put((torch.from_numpy(rows), torch.tensor(7)), torch.tensor(-1.0)),
    )
    (wrong,) = [t for t in compare(tmp_path / "ckpt", source).tensors if not t.equal]
    assert wrong.values == 20480 * 512 and wrong.different == 3 and wrong.first == (3, 7)
    assert wrong.largest == 20000 * 512 + 7 + 1
