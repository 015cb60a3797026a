"""Export: the folder that came in comes out byte for byte; PyTorch files come out as safetensors with equal bits."""

import hashlib
import json
import math
import os
import shutil
import types

import jax
import numpy as np
import pytest
import safetensors.torch
import tiny_models
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo import checkpoints
from shardzoo.checkpoints import Grid
from shardzoo.convert import export as exporting
from shardzoo.convert.backwards import OutPiece
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export, flat_blocks
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError
from shardzoo.zoo.families import config_from_json, find_family
from shardzoo.zoo.mesh import make_mesh


def load(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_safetensors_folder_comes_back_byte_for_byte(tmp_path, name):
    source = tiny_models.save(name, tmp_path / "source")
    convert(source, tmp_path / "ckpt", sync=False)
    report = export(tmp_path / "ckpt", tmp_path / "out")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(source)
    assert not report.changed and set(report.identical) == {f.name for f in source.glob("*.safetensors")}
    for file, digest in report.files.items():
        assert hashlib.sha256((source / file).read_bytes()).hexdigest() == digest
    assert report.bytes_written == sum(map(len, tiny_models.files(source).values()))
    json.dumps(report.to_json())


def test_unusual_headers_come_back_byte_for_byte(tmp_path):
    """Keys out of order, odd spacing, metadata, buffers, padding inside the header, and a wrapper's prefix."""
    source = tiny_models.save("llama", tmp_path / "source", shard="1GB")
    state = safetensors.torch.load_file(source / "model.safetensors")
    state |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(3)}
    state["model.layers.0.position_ids"] = torch.arange(7)
    header, data = {}, b""
    for key in sorted(state, key=lambda key: hashlib.sha256(key.encode()).digest()):
        raw = tiny_models.bits(state[key]).tobytes()
        kind = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}[state[key].dtype]
        offsets = [len(data), len(data) + len(raw)]
        header["module." + key] = {"shape": list(state[key].shape), "data_offsets": offsets, "dtype": kind}
        data += raw
    header["__metadata__"] = {"trained by": "tést"}
    text = json.dumps(header, indent=3, ensure_ascii=False).encode() + b"   \n"
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    convert(source, tmp_path / "ckpt", sync=False)
    export(tmp_path / "ckpt", tmp_path / "out", layout="transformers")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(source)


@pytest.mark.parametrize(("name", "shards"), [("llama", 1), ("llama-tied", 1), ("qwen2", 3)])
def test_pickled_files_come_back_as_safetensors_with_the_same_bits(tmp_path, name, shards):
    source = tiny_models.save_bin(name, tmp_path / "source", torch.float16, shards)
    convert(source, tmp_path / "ckpt", sync=False)
    report = export(tmp_path / "ckpt", tmp_path / "out")
    wanted = {k: v for f in source.glob("*.bin") for k, v in torch.load(f, weights_only=True).items()}
    got = load(tmp_path / "out")
    assert set(got) == set(wanted)
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(tiny_models.bits(got[key]), tiny_models.bits(value))
    assert not report.identical and all("PyTorch file" in why for why in report.changed.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for key, value in again.state_dict().items():
        np.testing.assert_array_equal(tiny_models.bits(value), tiny_models.bits(wanted[key]))


def test_a_cast_checkpoint_comes_out_cast_and_says_so(tmp_path):
    source = tiny_models.save("mistral", tmp_path / "source", torch.float32)
    convert(source, tmp_path / "ckpt", dtype="bf16", sync=False)
    report = export(tmp_path / "ckpt", tmp_path / "out")
    wanted, got = load(source), load(tmp_path / "out")
    assert set(got) == set(wanted)
    for key, value in wanted.items():
        assert torch.equal(got[key], value.to(torch.bfloat16))
    assert all("cast to bfloat16" in why for why in report.changed.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in got.values())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def save_again(ckpt, to, dtype=None, change=lambda leaf: leaf):
    """Restores a checkpoint on one device and saves it as a checkpoint that came from the same files."""
    mesh = make_mesh()
    opened = checkpoints.open(ckpt)
    model = checkpoints.restore(opened, mesh, dtype=dtype)
    family = find_family(opened.manifest.header.family)
    declared = family.declare(config_from_json(family.config, opened.manifest.header.config))
    return checkpoints.save(to, jax.tree.map(change, model), declared, source=opened, sync=False)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "mistral3"])
def test_a_model_saved_in_another_dtype_comes_out_in_that_dtype(tmp_path, name):
    source = tiny_models.save(name, tmp_path / "source")
    convert(source, tmp_path / "ckpt", sync=False)
    save_again(tmp_path / "ckpt", tmp_path / "again", dtype="float32")
    report = export(tmp_path / "again", tmp_path / "out")
    wanted, got = load(source), load(tmp_path / "out")
    others = {key for key in wanted if "vision" in key or "multi_modal" in key}
    assert set(got) == set(wanted)
    for key, value in wanted.items():
        assert torch.equal(got[key], value if key in others else value.float()), key
    assert not report.identical and set(report.changed) == {f.name for f in source.glob("*.safetensors")}
    assert any("cast to float32" in why for why in report.changed.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert verify(tmp_path / "again", source).cast == "float32"


def test_a_model_saved_with_other_values_comes_out_in_the_files_it_came_in(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")
    convert(source, tmp_path / "ckpt", sync=False)
    save_again(tmp_path / "ckpt", tmp_path / "again", change=lambda leaf: 2 * leaf)
    report = export(tmp_path / "again", tmp_path / "out")
    wanted, got = load(source), load(tmp_path / "out")
    assert set(got) == set(wanted) and all(torch.equal(got[key], 2 * wanted[key]) for key in wanted)
    assert not report.identical and set(report.changed) == {f.name for f in source.glob("*.safetensors")}
    assert all("running model" in why for why in report.changed.values())
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (source / index).read_bytes()


def test_parts_that_were_left_out_stay_out_and_the_index_follows(tmp_path):
    source = tiny_models.save("mistral3", tmp_path / "source")
    convert(source, tmp_path / "ckpt", component="language_model", sync=False)
    report = export(tmp_path / "ckpt", tmp_path / "out")
    wanted = {k: v for k, v in load(source).items() if "vision" not in k and "multi_modal" not in k}
    got = load(tmp_path / "out")
    assert set(got) == set(wanted) and all(torch.equal(got[key], wanted[key]) for key in wanted)
    assert any("left out" in why for why in report.changed.values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key: (tmp_path / "out" / name).exists() for key, name in index.items()} == dict.fromkeys(wanted, True)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    source = tiny_models.save("llama-tied", folder / "source")
    convert(source, folder / "ckpt", sync=False)
    return folder / "ckpt"


def test_an_existing_destination_is_refused_or_replaced(ckpt, tmp_path):
    out = tmp_path / "out"
    export(ckpt, out)
    before = tiny_models.files(out)
    with pytest.raises(InputError, match="exists already"):
        export(ckpt, out)
    (out / "model.safetensors.index.json").write_text("{}")
    export(ckpt, out, overwrite=True)
    assert tiny_models.files(out) == before and os.listdir(tmp_path) == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InputError, match="mine: exists"):
        export(ckpt, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_layouts_budgets_and_folders_that_cannot_be_are_refused(ckpt, tmp_path):
    with pytest.raises(InputError, match="layout='original'"):
        export(ckpt, tmp_path / "out", layout="original")
    with pytest.raises(InputError, match="memory_budget=5"):
        export(ckpt, tmp_path / "out", memory_budget=5)
    (tmp_path / "out.shardzoo-export").mkdir()
    (tmp_path / "out.shardzoo-export" / "notes.txt").touch()
    with pytest.raises(InputError, match="left by another program"):
        export(ckpt, tmp_path / "out")
    with pytest.raises(InputError, match="no such folder"):
        export(tmp_path / "nothing", tmp_path / "out2")
    assert sorted(os.listdir(tmp_path)) == ["out.shardzoo-export"]


def test_a_damaged_checkpoint_ends_the_export_and_leaves_nothing(ckpt, tmp_path):
    damaged = tiny_models.copy(ckpt, tmp_path / "ckpt")
    tiny_models.flip_bit(damaged, "embed.weight")
    with pytest.raises(InputError, match=r"embed\.weight"):
        export(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_leaf_that_was_swapped_for_another_sound_one_is_found_by_its_digest(ckpt, tmp_path):
    """Both files pass their crc32c; only the digest of the file that came in tells."""
    damaged = tiny_models.copy(ckpt, tmp_path / "ckpt")
    one, other = (damaged / "params" / f"blocks.{name}_norm.weight" for name in ("attn", "mlp"))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    with pytest.raises(InputError, match="sha256 is"):
        export(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_carries_on_with_the_files_it_has(ckpt, tmp_path):
    export(ckpt, tmp_path / "whole")

    class Enough(Exception):
        pass

    def stop(done, total, what):
        journal = tmp_path / "out.shardzoo-export" / "export.journal"
        if len(journal.read_text().splitlines()) > 1:  # one of the files is whole
            raise Enough

    with pytest.raises(Enough):
        export(ckpt, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    report = export(ckpt, tmp_path / "out")
    assert report.bytes_resumed > 0
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(tmp_path / "whole")


@pytest.fixture
def unfinished(ckpt, tmp_path):
    """An export stopped when some of its files were whole."""

    def stop(done, total, what):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(ckpt, tmp_path / "out", progress=stop)
    return tmp_path / "out.shardzoo-export"


def torn(journal):
    journal.write_bytes(journal.read_bytes()[:-5] + b"\n")


def damaged(journal):
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)


@pytest.mark.parametrize("spoil", [torn, damaged, lambda journal: journal.write_bytes(b"\xff\n{}\n"), os.unlink])
def test_a_journal_that_is_damaged_or_gone_costs_only_what_it_said(ckpt, tmp_path, unfinished, spoil):
    spoil(unfinished / "export.journal")
    export(ckpt, tmp_path / "out")
    export(ckpt, tmp_path / "whole")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


@pytest.mark.parametrize("step", ["rename", "rmtree"])
def test_an_export_stopped_as_it_takes_its_name_is_whole_or_taken_up_again(ckpt, tmp_path, monkeypatch, step):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(exporting, {"rename": "os", "rmtree": "shutil"}[step], stopping(step, kill))
        with pytest.raises(Killed):
            export(ckpt, tmp_path / "out")
    assert (tmp_path / "out").exists() == (step == "rmtree")
    if step == "rename":
        assert export(ckpt, tmp_path / "out").bytes_resumed > 0
    export(ckpt, tmp_path / "whole")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(tmp_path / "whole")


def stopping(name, kill):
    """The module that has this function, with another one in its place."""
    module = os if hasattr(os, name) else shutil
    return types.SimpleNamespace(**{**vars(module), name: kill})


def test_the_lock_of_an_export_holds_until_it_has_its_name(ckpt, tmp_path, monkeypatch):
    """Another export that starts right before the rename is refused and takes nothing away."""
    refused = []

    def rename(old, new):
        with pytest.raises(InputError, match="another process is writing it"):
            export(ckpt, tmp_path / "out")
        refused.append(new)
        os.rename(old, new)

    monkeypatch.setattr(exporting, "os", stopping("rename", rename))
    export(ckpt, tmp_path / "out")
    assert refused == [tmp_path / "out"] and sorted(os.listdir(tmp_path)) == ["out"]


def test_a_checkpoint_saved_from_a_running_model_has_no_files_to_go_back_to(tmp_path, ckpt):
    import dataclasses

    opened = checkpoints.open(ckpt)
    header = dataclasses.replace(opened.manifest.header, detail={})
    live = checkpoints.Checkpoint(opened.path, dataclasses.replace(opened.manifest, header=header))
    with pytest.raises(InputError, match="saved from a running model"):
        export(live, tmp_path / "out")


@st.composite
def boxes(draw):
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    at = tuple((a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))
    outer = tuple(draw(st.integers(1, n)) for n in shape)
    return shape, at, outer, draw(st.integers(1, 300))


@settings(max_examples=300, deadline=None)
@given(boxes())
def test_flat_blocks_follow_each_other_and_keep_to_the_limit(box):
    shape, at, outer, most = box
    grid = Grid(shape=shape, outer=outer, inner=outer)
    piece = OutPiece(path="x", at=at, offset=0, itemsize=2, row_bytes=1, row_stride=1)
    leaf = np.arange(math.prod(shape)).reshape(shape)
    wanted = leaf[tuple(slice(a, b) for a, b in at)].reshape(-1)
    found, position = [], 0
    for block, first in flat_blocks(piece, grid, most):
        values = leaf[block].reshape(-1)
        assert first == position and (values.size * 2 <= most or values.size == 1)
        position += values.size
        found.append(values)
    np.testing.assert_array_equal(np.concatenate(found), wanted)
