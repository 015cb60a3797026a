"""Conversion of tiny models as users have them: every value in its place, bit for bit, and what is refused and why."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import tiny_models
import torch

from shardzoo import checkpoints
from shardzoo.convert import convert as conversion
from shardzoo.convert import replacing, stream
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.source import open_source
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError

LAYERS = 3


def stored_bits(checkpoint, path):
    values = checkpoint.read(path)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(*values.shape, values.dtype.itemsize)


def roots(state):
    """(prefix of the body, key of the head) of a state dict, told from its keys and not from the converter's rules."""
    embed = next(key for key in state if key.endswith("embed_tokens.weight"))
    head = next((key for key in state if key.endswith("lm_head.weight")), None)
    return embed.removesuffix("embed_tokens.weight"), head


def expected_leaves(state):
    """Path -> bits of the leaf, put together by hand from a transformers state dict."""
    body, head = roots(state)

    def stacked(name):
        return np.stack([tiny_models.bits(state[f"{body}layers.{i}.{name}"]) for i in range(LAYERS)])

    leaves = {
        "embed.weight": tiny_models.bits(state[f"{body}embed_tokens.weight"]),
        "norm.weight": tiny_models.bits(state[f"{body}norm.weight"]),
        "blocks.attn_norm.weight": stacked("input_layernorm.weight"),
        "blocks.mlp_norm.weight": stacked("post_attention_layernorm.weight"),
    }
    if head:
        leaves["head.weight"] = tiny_models.bits(state[head])
    if f"{body}layers.0.self_attn.q_norm.weight" in state:
        leaves |= {f"blocks.attn.{n}_norm.weight": stacked(f"self_attn.{n}_norm.weight") for n in "qk"}
    for kind in ("weight", "bias"):
        last = (32,) if kind == "weight" else ()
        here = {n for n in ("q", "k", "v", "o") if f"{body}layers.0.self_attn.{n}_proj.{kind}" in state}
        if "q" in here:
            item = stacked(f"self_attn.q_proj.{kind}").shape[-1]
            leaves[f"blocks.attn.q.{kind}"] = stacked(f"self_attn.q_proj.{kind}").reshape(LAYERS, 4, 8, *last, item)
            both = [stacked(f"self_attn.{n}_proj.{kind}").reshape(LAYERS, 2, 8, *last, item) for n in "kv"]
            leaves[f"blocks.attn.kv.{kind}"] = np.stack(both, axis=1)
        if "o" in here:
            out = stacked(f"self_attn.o_proj.{kind}")
            leaves[f"blocks.attn.out.{kind}"] = out.reshape(LAYERS, 32, 4, 8, -1) if kind == "weight" else out
        if f"{body}layers.0.mlp.up_proj.{kind}" in state:
            pair = [stacked(f"mlp.{n}_proj.{kind}") for n in ("gate", "up")]
            leaves[f"blocks.mlp.gate_up.{kind}"] = np.stack(pair, axis=1)
            leaves[f"blocks.mlp.down.{kind}"] = stacked(f"mlp.down_proj.{kind}")
    return leaves


def check_values(checkpoint, state):
    wanted = expected_leaves(state)
    assert set(checkpoint.manifest.leaves) == set(wanted)
    for path, bits in wanted.items():
        np.testing.assert_array_equal(stored_bits(checkpoint, path), bits, err_msg=path)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_every_value_of_a_safetensors_folder_is_in_its_place(tmp_path, name):
    source = tiny_models.save(name, tmp_path / "source")
    report = convert(source, tmp_path / "ckpt", sync=False)
    checkpoint = checkpoints.open(tmp_path / "ckpt")
    files = sorted(source.glob("*.safetensors"))
    assert len(files) > 2
    state = {key: tensor for file in files for key, tensor in safetensors.torch.load_file(file).items()}
    check_values(checkpoint, state)
    others = {key for key in state if "vision" in key or "visual" in key or "multi_modal" in key}
    assert set(checkpoint.manifest.carried) == set(report.carried) == others
    for key in others:
        np.testing.assert_array_equal(stored_bits(checkpoint, f"carried/{key}"), tiny_models.bits(state[key]))
    assert report.tensors == len(state) and report.bytes_read == sum(t.nbytes for t in state.values())
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(checkpoint.assets)
    assert checkpoint.assets["config.json"].read_bytes() == (source / "config.json").read_bytes()
    checkpoints.verify(tmp_path / "ckpt", level="full")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
def test_every_value_of_pickled_files_is_in_its_place(tmp_path, name, shards):
    source = tiny_models.save_bin(name, tmp_path / "source", torch.float16, shards)
    report = convert(source, tmp_path / "ckpt", sync=False)
    checkpoint = checkpoints.open(tmp_path / "ckpt")
    state = {key: value for f in source.glob("*.bin") for key, value in torch.load(f, weights_only=True).items()}
    body, head = roots(state)
    if name == "llama-tied":
        assert report.aliases == {head: f"{body}embed_tokens.weight"} == checkpoint.manifest.header.aliases
        state.pop(head)
    check_values(checkpoint, state)


def test_the_manifest_names_every_source_tensor_once_and_the_digest_of_every_file(tmp_path):
    import hashlib

    source = tiny_models.save("qwen2", tmp_path / "source")
    report = convert(source, tmp_path / "ckpt", sync=False)
    manifest = checkpoints.open(tmp_path / "ckpt").manifest
    keys = [record["key"] for leaf in manifest.leaves.values() for record in leaf.provenance]
    assert sorted(keys) == sorted(json.loads((source / "model.safetensors.index.json").read_text())["weight_map"])
    for entry in manifest.header.sources:
        data = (source / entry.name).read_bytes()
        assert entry.sha256 == hashlib.sha256(data).hexdigest() == report.files[entry.name]
        assert entry.size == len(data) and entry.header.encode() == data[8 : 8 + len(entry.header.encode())]


def test_two_conversions_write_the_same_bytes(tmp_path):
    source = tiny_models.save("mistral3", tmp_path / "source")
    for name in ("one", "two"):
        convert(source, tmp_path / name, sync=False)
    assert tiny_models.files(tmp_path / "one") == tiny_models.files(tmp_path / "two")


@pytest.mark.parametrize(("name", "made"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_dtype_casts_to_nearest(tmp_path, name, made):
    source = tiny_models.save("llama", tmp_path / "source", torch.float32)
    report = convert(source, tmp_path / "ckpt", dtype=name, sync=False)
    state = {k: v for f in source.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
    check_values(checkpoints.open(tmp_path / "ckpt"), {key: value.to(made) for key, value in state.items()})
    assert report.cast == str(made).removeprefix("torch.")


def test_a_cast_that_loses_a_value_to_infinity_is_refused(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source", torch.float32)
    file = next(f for f in source.glob("*.safetensors") if "model.norm.weight" in safetensors.torch.load_file(f))
    tensors = safetensors.torch.load_file(file)
    tensors["model.norm.weight"][3] = 1e6
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"model.norm.weight: 1 values do not fit dtype=float16, the first is 1e\+06"):
        convert(source, tmp_path / "ckpt", dtype="fp16", sync=False)
    assert not (tmp_path / "ckpt").exists()


def test_fp8_keeps_its_bits_and_mixed_dtypes_need_a_cast(tmp_path):
    source = tiny_models.save("llama-tied", tmp_path / "source", torch.float32, shard="1GB")
    file = source / "model.safetensors"
    state = {key: value.to(torch.float8_e4m3fn) for key, value in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(state, file, {"format": "pt"})
    convert(source, tmp_path / "ckpt", sync=False)
    check_values(checkpoints.open(tmp_path / "ckpt"), state)
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"].to(torch.float32)
    state["model.layers.2.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int8)
    safetensors.torch.save_file(state, file, {"format": "pt"})
    with pytest.raises(InputError) as error:
        plan_conversion(source)
    assert "model.layers.2.input_layernorm.weight: dtype int8 is not floating point" in str(error.value)
    assert "blocks.mlp.down.weight: its tensors have the dtypes float32 and float8_e4m3fn" in str(error.value)
    assert "model.layers.1.mlp.down_proj.weight: dtype float32" in str(error.value)
    with pytest.raises(InputError) as error:
        plan_conversion(source, dtype="bf16")
    assert "down_proj" not in str(error.value)


def rewrite(source, change):
    """Applies `change` to the state dict of a one-file folder."""
    file = source / "model.safetensors"
    state = safetensors.torch.load_file(file)
    state = change(state) or state
    safetensors.torch.save_file({key: value.contiguous().clone() for key, value in state.items()}, file)
    return source


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama") / "source", shard="1GB")


@pytest.fixture
def source(llama, tmp_path):
    return tiny_models.copy(llama, tmp_path / "source")


def refusal(source, **options):
    """The message, after making sure that nothing was written."""
    before = set(os.listdir(source.parent))
    with pytest.raises(InputError) as error:
        convert(source, source.parent / "ckpt", sync=False, **options)
    assert set(os.listdir(source.parent)) == before
    return str(error.value)


def test_every_misfit_is_in_one_message(source):
    def spoil(state):
        del state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"]
        state["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(8, 32, dtype=torch.bfloat16)
        state["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
        state["score.weight"] = torch.zeros(2, 32)

    message = refusal(rewrite(source, spoil))
    assert "model.layers.{0-1}.mlp.up_proj.weight: missing, of shape (mlp=48, embed=32)" in message
    wanted = "shape (8, 32), expected (16, 32) = (kv_heads=2 x head_dim=8, embed=32)"
    assert f"model.layers.2.self_attn.k_proj.weight: {wanted}" in message
    assert "model.norm.weight: dtype int32" in message
    assert "score.weight: not known, of shape (2, 32)" in message
    assert "family decoder in layout 'transformers'" in message


def test_a_config_of_another_size_is_refused_with_both_sizes(source):
    tiny_models.edit_config(source, num_hidden_layers=2, num_key_value_heads=4)
    message = refusal(source)
    assert "the file has layers 0 to 2, the config says 2" in message
    assert "model.layers.2.mlp.up_proj.weight: not known" in message
    assert "model.layers.{0-1}.self_attn.v_proj.weight: shape (16, 32), expected (32, 32)" in message


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "transformer.", "module._orig_mod."])
def test_known_wrappers_are_taken_off_and_said_so(source, tmp_path, prefix):
    wanted = safetensors.torch.load_file(source / "model.safetensors")
    rewrite(source, lambda state: {prefix + key: value for key, value in state.items()})
    report = convert(source, tmp_path / "ckpt", sync=False)
    assert report.prefix == prefix and any(repr(prefix) in note for note in report.notes)
    check_values(checkpoints.open(tmp_path / "ckpt"), wanted)


@pytest.mark.parametrize("inner", ["_orig_mod.", "_fsdp_wrapped_module._checkpoint_wrapped_module."])
def test_wrappers_inside_of_keys_are_taken_off_and_exported_again(source, tmp_path, inner):
    """As torch.compile, FSDP and recomputed activations leave them in each block, also where all of it is wrapped."""
    wanted = safetensors.torch.load_file(source / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4.0)}

    def wrapped(state):
        blocks = {re.sub(r"(layers\.\d+\.)", rf"\1{inner}", key): value for key, value in (state | extra).items()}
        return {f"_fsdp_wrapped_module.{key}": value for key, value in blocks.items()}

    rewrite(source, wrapped)
    report = convert(source, tmp_path / "ckpt", sync=False)
    assert report.prefix == "_fsdp_wrapped_module." and any("wrappers inside of keys" in n for n in report.notes)
    check_values(checkpoints.open(tmp_path / "ckpt"), wanted)
    compared = verify(tmp_path / "ckpt", source).tensors
    assert len(compared) == len(wanted) + 1 and not any(one.different or one.problem for one in compared)
    export(tmp_path / "ckpt", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_model_that_peft_has_wrapped_is_read_without_its_wrappers(source, tmp_path):
    """Where its adapters are gone; saved whole with them it is refused, with what to do."""
    wanted = safetensors.torch.load_file(source / "model.safetensors")

    def wrapped(state):
        keys = {key: re.sub(r"(q_proj|down_proj)\.", r"\1.base_layer.", key) for key in state}
        return {f"base_model.model.{keys[key]}": value for key, value in state.items()}

    rewrite(source, wrapped)
    convert(source, tmp_path / "ckpt", sync=False)
    check_values(checkpoints.open(tmp_path / "ckpt"), wanted)
    export(tmp_path / "ckpt", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    rewrite(
        source,
        lambda state: state | {"base_model.model.layers.0.q_proj.lora_A.default.weight": torch.zeros(2, 8)},
    )
    message = refusal(source)
    assert "saved whole: 1 tensors of adapters" in message and "--lora" in message and "merge_and_unload()" in message


def test_an_unknown_prefix_is_named_and_taken_off_on_request(source, tmp_path):
    wanted = safetensors.torch.load_file(source / "model.safetensors")
    rewrite(source, lambda state: {f"policy.net.{key}": value for key, value in state.items()})
    message = refusal(source)
    assert "all keys start with 'policy.net.'" in message and "prefix='policy.net.'" in message
    convert(source, tmp_path / "ckpt", prefix="policy.net.", sync=False)
    check_values(checkpoints.open(tmp_path / "ckpt"), wanted)
    assert "is not on all keys" in refusal(source, prefix="value.", overwrite=True)


def test_another_family_is_named_as_what_it_looks_like(source):
    keys = ["layers.0.linear_attn.in_proj_qkvz.weight", "layers.0.linear_attn.A_log"]
    rewrite(source, lambda _: {key: torch.zeros(2) for key in keys})
    assert "Qwen3.5" in refusal(source)
    tiny_models.edit_config(source, model_type="mamba2")
    message = refusal(source)
    assert "'mamba2'" in message and "Qwen3.5" in message and "decoder (llama" in message
    (source / "config.json").unlink()
    message = refusal(source)
    assert "no config.json" in message and "Qwen3.5" in message
    assert "family='mamba'" in refusal(source, family="mamba", config=write_config(source))


def write_config(source):
    path = source.parent / "other.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    return path


def test_a_config_elsewhere_can_be_named(source, tmp_path):
    (source / "config.json").rename(tmp_path / "c.json")
    report = convert(source / "model.safetensors", tmp_path / "ckpt", config=tmp_path / "c.json", sync=False)
    assert report.tensors == 51
    assert "is not UTF-8" in refusal(source, config=source / "model.safetensors")
    for text, words in (("{", "is not valid JSON"), ("[]", "holds a list"), ('{"a": 1, "a": 2}', "key 'a' twice")):
        for path in (tmp_path / "c.json", source / "config.json"):
            path.write_text(text)
        assert words in refusal(source, config=tmp_path / "c.json") and words in refusal(source)
        (source / "config.json").unlink()
    assert "cannot be read" in refusal(source, config=tmp_path / "none.json")


def test_unsupported_configs_are_refused_with_what_the_file_is(source):
    tiny_models.edit_config(source, hidden_act="relu")
    message = refusal(source)
    assert "hidden_act='relu'" in message and "look like: Llama" in message


def test_a_missing_head_is_explained(source):
    rewrite(source, lambda state: {key: value for key, value in state.items() if key != "lm_head.weight"})
    message = refusal(source)
    assert "lm_head.weight: missing" in message and "tie_word_embeddings" in message


def test_a_tied_head_that_differs_is_found_before_anything_is_written(source, tmp_path):
    tiny_models.edit_config(source, tie_word_embeddings=True)
    assert "lm_head.weight: differs from model.embed_tokens.weight in row 0" in refusal(source)

    def tie(state, row=None):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        if row is not None:
            state["lm_head.weight"][row, 5] += 1

    rewrite(source, lambda state: tie(state, 70))
    assert "in row 70" in refusal(source)
    rewrite(source, tie)
    report = convert(source, tmp_path / "ckpt", sync=False)
    assert report.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "head.weight" not in checkpoints.open(tmp_path / "ckpt").manifest.leaves
    rewrite(source, lambda state: state | {"lm_head.weight": state["lm_head.weight"][:90]})
    assert "lm_head.weight: shape (90, 32) or dtype differs" in refusal(source)


def test_a_dry_run_leaves_nothing_and_predicts(source, monkeypatch):
    before = tiny_models.files(source.parent)
    monkeypatch.chdir(source.parent)
    probed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: probed.append(os.fstat(file).st_size) or fsync(file))
    report = convert("source", "sub/ckpt", dry_run=True)
    assert (report.source, report.destination) == ("source", "sub/ckpt")
    assert 0 < sum(probed) <= report.bytes_on_disk
    assert tiny_models.files(source.parent) == before and not (source.parent / "sub").exists()
    assert report.dry_run and report.seconds > 0 and report.peak_memory > 0
    assert report.bytes_on_disk > report.bytes_written == report.bytes_read > 0
    json.dumps(report.to_json())


def test_an_existing_destination_is_refused_or_replaced_whole(source, tmp_path):
    convert(source, tmp_path / "ckpt", sync=False)
    before = tiny_models.files(tmp_path / "ckpt")
    with pytest.raises(InputError, match="exists already"):
        convert(source, tmp_path / "ckpt", sync=False)
    convert(source, tmp_path / "ckpt", dtype="fp16", overwrite=True, sync=False)
    assert tiny_models.files(tmp_path / "ckpt") != before
    assert set(os.listdir(tmp_path)) == {"source", "ckpt"}
    convert(source, tmp_path / "ckpt", overwrite=True, sync=False)
    assert tiny_models.files(tmp_path / "ckpt") == before
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="mine: exists"):
        convert(source, tmp_path / "mine", overwrite=True, sync=False)
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("name", ["ckpt.old", "ckpt.new"])
def test_replacing_leaves_checkpoints_of_other_names_alone(source, tmp_path, name):
    for made in (name, "ckpt"):
        convert(source, tmp_path / made, sync=False)
    convert(source, tmp_path / "ckpt", dtype="fp16", overwrite=True, sync=False)
    assert set(os.listdir(tmp_path)) == {"source", "ckpt", name}
    checkpoints.verify(tmp_path / name, level="full")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(5))
def test_replacing_stopped_at_any_step_loses_nothing_and_is_taken_up_again(source, tmp_path, monkeypatch, step):
    """Steps: before the renames, between them, before the old one is removed, half-way there, and not at all."""
    target = tmp_path / "ckpt"
    convert(source, target, sync=False)
    old = tiny_models.files(target)
    convert(source, tmp_path / "wanted", dtype="fp16", sync=False)
    new = tiny_models.files(tmp_path / "wanted")
    left = [step]

    def reached(work):
        def call(*args):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return work(*args)

        return call

    def remove_half(folder):
        (folder / "manifest" / "metadata").unlink()
        if left[0] == 0:
            raise Killed
        shutil.rmtree(folder)

    with monkeypatch.context() as patch:
        patch.setattr(replacing, "os", types.SimpleNamespace(**{**vars(os), "rename": reached(os.rename)}))
        patch.setattr(replacing, "shutil", types.SimpleNamespace(rmtree=reached(remove_half)))
        with contextlib.suppress(Killed):
            convert(source, target, dtype="fp16", overwrite=True, sync=False)
    kept = [tiny_models.files(folder) for folder in tmp_path.glob("ckpt*")]
    assert new in kept and (old in kept or step > 2)
    convert(source, target, dtype="fp16", overwrite=True, sync=False)
    assert tiny_models.files(target) == new
    assert set(os.listdir(tmp_path)) == {"source", "ckpt", "wanted"}


def test_only_one_process_replaces_a_checkpoint(source, tmp_path):
    target = tmp_path / "ckpt"
    convert(source, target, sync=False)
    with (
        replacing.locked(target, target),
        pytest.raises(InputError, match="ckpt: another process is writing it"),
    ):
        convert(source, target, overwrite=True, sync=False)


def test_options_that_cannot_be_are_refused(source):
    assert "dtype='int8'" in refusal(source, dtype="int8")
    assert "memory_budget=1" in refusal(source, memory_budget=1)


def test_a_full_disk_is_known_beforehand(source, tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    before = set(os.listdir(tmp_path))
    with pytest.raises(InputError, match=r"4,096 (bytes )?are free|4,096 are free"):
        convert(source, tmp_path / "ckpt", sync=False)
    assert set(os.listdir(tmp_path)) == before


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Leaves above 1 MiB, cut into several files, whose blocks come from single source tensors: folder and values."""
    tmp_path = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    source = tmp_path / "source"
    source.mkdir()
    sizes = {"vocab_size": 20480, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8}
    (source / "config.json").write_text(json.dumps({**config, **sizes}))
    state = {"model.embed_tokens.weight": (20480, 512), "lm_head.weight": (20480, 512), "model.norm.weight": (512,)}
    for i in range(2):
        block = f"model.layers.{i}."
        state |= {f"{block}self_attn.{n}_proj.weight": (512 if n in "qo" else 256, 512) for n in "qkvo"}
        state |= {f"{block}mlp.{n}_proj.weight": (1536, 512) for n in ("gate", "up")}
        state |= {f"{block}mlp.down_proj.weight": (512, 1536)}
        state |= {f"{block}{n}_layernorm.weight": (512,) for n in ("input", "post_attention")}
    values = {key: rng.standard_normal(shape, np.float32) for key, shape in state.items()}
    keys = list(values)
    for i in range(4):
        safetensors.numpy.save_file(
            {k: values[k] for k in keys[i::4]}, source / f"model-{i + 1:05}-of-00004.safetensors"
        )
    return source, values


def test_a_budget_that_the_largest_block_passes_is_refused_with_the_bytes_it_needs(large, tmp_path):
    source, _ = large
    with pytest.raises(InputError, match=r"memory_budget=10000000 is below the \d+ bytes") as error:
        convert(source, tmp_path / "ckpt", memory_budget=10_000_000, sync=False)
    least = int(str(error.value).split()[4])
    file = 20480 * 512 * 4 // 2
    assert file <= least <= 2 * (32 << 20)
    with pytest.raises(InputError, match="is below"):
        convert(source, tmp_path / "ckpt", memory_budget=least - 1, dry_run=True)
    convert(source, tmp_path / "ckpt", memory_budget=least, dry_run=True)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("strategy", ["mmap", "pread"])
def test_blocks_in_flight_stay_within_the_budget(large, tmp_path, monkeypatch, strategy):
    """Counted from before each block is read until it has been written, over all threads."""
    source, _ = large
    budget, lock, now, most = 64 << 20, threading.Lock(), [0], [0]

    take, held, mine = stream.take, stream.Held, threading.local()

    def counted_take(opened, piece, share):
        rows, whole, values = take(opened, piece, share)
        with lock:
            assert whole.nbytes + (0 if np.shares_memory(whole, values) else values.nbytes) <= mine.cost
            now[0] += mine.cost
            most[0] = max(most[0], now[0])
        return rows, whole, values

    def counted_held(budget, nbytes, give):
        def given():
            with lock:
                now[0] -= nbytes
            give()

        mine.cost = nbytes
        return held(budget, nbytes, given)

    monkeypatch.setattr(stream, "take", counted_take)
    monkeypatch.setattr(stream, "Held", counted_held)
    monkeypatch.setattr(conversion, "open_source", functools.partial(open_source, strategy=strategy))
    convert(source, tmp_path / "ckpt", memory_budget=budget, sync=False)
    assert now[0] == 0 and budget // 2 < most[0] <= budget


def test_blocks_larger_than_one_file_stream_under_a_small_budget(large, tmp_path):
    source, values = large
    convert(source, tmp_path / "ckpt", memory_budget=64 << 20, sync=False)
    checkpoint = checkpoints.open(tmp_path / "ckpt")
    kv = checkpoint.manifest.leaves["blocks.attn.kv.weight"]
    assert kv.grid.outer[:2] == (1, 1)
    assert len(list(checkpoint.manifest.leaves["embed.weight"].grid.indices())) > 1
    for path, key in (("embed.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")):
        np.testing.assert_array_equal(checkpoint.read(path), values[key])
    for i in range(2):
        for n, block in ((0, "gate"), (1, "up")):
            got = checkpoint.read("blocks.mlp.gate_up.weight")[i, n]
            np.testing.assert_array_equal(got, values[f"model.layers.{i}.mlp.{block}_proj.weight"])
        got = checkpoint.read("blocks.attn.kv.weight")[i]
        for n, block in enumerate("kv"):
            np.testing.assert_array_equal(
                got[n].reshape(256, 512), values[f"model.layers.{i}.self_attn.{block}_proj.weight"]
            )


def test_importing_the_converter_starts_no_device():
    program = (
        "import sys; from shardzoo.convert import convert, export, verify, families; families.rules_of('decoder');"
        "import jax; sys.exit(bool(jax._src.xla_bridge._backends))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
