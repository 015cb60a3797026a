"""Folders, indexes and single files as one source: what is read, and what is refused by name."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardzoo.convert.source import open_source, row_blocks
from shardzoo.errors import InputError

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
A = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3, dtype=torch.bfloat16)}
B = {"b.weight": torch.arange(6).reshape(2, 3), "b.scale": torch.tensor(0.5)}
INDEX = "model.safetensors.index.json"


def write_index(folder: Path, weight_map: dict, name: str = INDEX) -> Path:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_file(A, tmp_path / PARTS[0])
    save_file(B, tmp_path / PARTS[1])
    return write_index(tmp_path, dict.fromkeys(A, PARTS[0]) | dict.fromkeys(B, PARTS[1]))


def problem(path: Path, **options) -> str:
    with pytest.raises(InputError) as error:
        open_source(path, **options).close()
    return str(error.value)


def keys(path: Path, **options) -> set[str]:
    with open_source(path, **options) as source:
        return set(source.tensors)


# What is read


@pytest.mark.parametrize("name", ["", INDEX])
def test_a_sharded_folder(sharded, name):
    (sharded / "config.json").write_text('{"model_type": "x",  "n": 1.0}')
    for extra in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "generation_config.json"):
        (sharded / extra).write_text("{}")
    (sharded / "modeling_x.py").write_text("raise SystemExit")
    with open_source(sharded / name) as source:
        assert set(source.tensors) == A.keys() | B.keys()
        for key, tensor in {**A, **B}.items():
            array, info = source.read(key), source.tensors[key]
            assert array.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert (info.key, info.shape, info.nbytes) == (key, tuple(tensor.shape), array.nbytes)
            assert source.files[info.file].path == PARTS[key in B]
            assert source.path_of(info.file) == sharded / PARTS[key in B]
        assert source.config == {"model_type": "x", "n": 1.0}
        assert source.config_text == '{"model_type": "x",  "n": 1.0}'
        assert [path.name for path in source.extras] == [
            "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
        ]  # fmt: skip
        assert source.index_name == INDEX and source.index_text == (sharded / INDEX).read_text()
        for file in source.files:
            raw = (sharded / file.path).read_bytes()
            assert file.header == raw[8 : 8 + int.from_bytes(raw[:8], "little")]
            assert (file.kind, file.size, file.wrapper) == ("safetensors", len(raw), ())
        assert source.notes == [] and source.hub is None


def test_a_single_file_and_its_folder(tmp_path):
    save_file(A, tmp_path / "anything.safetensors")
    for path in (tmp_path, tmp_path / "anything.safetensors", str(tmp_path)):
        with open_source(path) as source:
            assert set(source.tensors) == A.keys()
            assert source.config is None and source.config_text is None and source.index_name is None


def test_a_sharded_folder_of_pytorch_files(tmp_path):
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    torch.save(A, tmp_path / names[0])
    torch.save(B, tmp_path / names[1])
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    torch.save({"state": B}, tmp_path / "optimizer.pt")
    weight_map = dict.fromkeys(A, names[0]) | dict.fromkeys(B, names[1])
    write_index(tmp_path, weight_map, "pytorch_model.bin.index.json")
    with open_source(tmp_path) as source:
        assert set(source.tensors) == A.keys() | B.keys()
        assert [file.kind for file in source.files] == ["pt-zip", "pt-zip"] and source.notes == []


def test_a_diffusers_index(tmp_path):
    names = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file(A, tmp_path / names[0])
    save_file(B, tmp_path / names[1])
    weight_map = dict.fromkeys(A, names[0]) | dict.fromkeys(B, names[1])
    write_index(tmp_path, weight_map, "diffusion_pytorch_model.safetensors.index.json")
    assert keys(tmp_path) == A.keys() | B.keys()


def test_numbered_parts_without_an_index(tmp_path):
    save_file(A, tmp_path / PARTS[0])
    assert f"{PARTS[0]} is one of 2 parts, 1 are missing (2)" in problem(tmp_path)
    save_file(B, tmp_path / PARTS[1])
    assert keys(tmp_path) == A.keys() | B.keys()
    save_file(A | B, tmp_path / PARTS[1])
    assert f"tensor 'a.weight' is in {PARTS[0]} and in {PARTS[1]}" in problem(tmp_path)


def test_a_kind_is_told_by_content(tmp_path):
    torch.save(A, tmp_path / "model.safetensors")
    save_file(A, tmp_path / "other.bin")
    assert keys(tmp_path / "model.safetensors") == keys(tmp_path / "other.bin") == A.keys()


def test_blocks_of_rows_make_the_tensor(sharded):
    with open_source(sharded) as source:
        info = source.tensors["a.weight"]
        for size in (1, 16, 31, 32, 48, 1 << 30):
            blocks = row_blocks(info, size)
            assert all((block.stop - block.start) * 16 <= max(size, 16) for block in blocks)
            whole = np.concatenate([source.read("a.weight", block) for block in blocks])
            np.testing.assert_array_equal(whole, A["a.weight"].numpy())
        assert row_blocks(source.tensors["b.scale"], 8) == [None]


def test_an_unknown_key_is_named(sharded):
    with open_source(sharded) as source, pytest.raises(InputError, match="holds no tensor 'c'"):
        source.read("c")


# What the index says and the files hold


def test_everything_wrong_with_a_sharded_folder_is_told_at_once(sharded):
    save_file(B | {"stray.weight": torch.ones(2), "a.bias": torch.ones(3)}, sharded / PARTS[1])
    third, fourth = "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"
    save_file({"c": torch.ones(100)}, sharded / third)
    os.truncate(sharded / third, 300)
    weight_map = (
        dict.fromkeys(A, PARTS[0]) | dict.fromkeys([*B, "b.absent"], PARTS[1]) | {"c": third, "d": fourth, "e": fourth}
    )
    text = problem(write_index(sharded, weight_map))
    assert f"{sharded}: the weights of {INDEX} are not sound" in text
    assert f"{fourth}: is missing, 2 tensors are to be in it (d, e)" in text
    assert (
        f"{third}: not a sound safetensors file" in text
        and "file size=300, expected 472: 172 bytes are missing" in text
    )
    assert f"{PARTS[1]}: lacks 1 of the 3 tensors that {INDEX} expects in it: b.absent" in text
    assert f"{PARTS[1]}: holds 1 tensors that {INDEX} does not list: stray.weight" in text
    assert f"{PARTS[1]}: holds 'a.bias', which {INDEX} places in {PARTS[0]}" in text


def test_an_index_of_other_things_is_none_of_weights(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    for name, text in (("faiss.index.json", "{}"), ("words.index.json", "not JSON")):
        (tmp_path / name).write_text(text)
    assert keys(tmp_path) == A.keys()
    save_file(B, tmp_path / "part.safetensors")
    write_index(tmp_path, dict.fromkeys(B, "part.safetensors"), "anything.index.json")
    assert keys(tmp_path) == B.keys()


def test_an_index_may_write_the_same_file_in_several_ways(sharded):
    wanted = keys(sharded)
    write_index(sharded, {key: f"./{PARTS[0]}" if key in A else f".//{PARTS[1]}" for key in (*A, *B)})
    assert keys(sharded) == wanted


def test_a_part_that_the_index_does_not_list(sharded):
    write_index(sharded, dict.fromkeys(A, PARTS[0]))
    assert f"{PARTS[1]} is numbered as one of its parts, but not listed" in problem(sharded)


def test_a_stray_file_is_not_read_and_said(sharded):
    save_file({"x": torch.ones(1)}, sharded / "consolidated.safetensors")
    torch.save(A, sharded / "pytorch_model.bin")
    with open_source(sharded) as source:
        assert "x" not in source.tensors
        assert source.notes == [f"{sharded}: not read beside {INDEX}: consolidated.safetensors, pytorch_model.bin"]


def test_a_dangling_link_is_named(sharded):
    (sharded / PARTS[1]).unlink()
    (sharded / PARTS[1]).symlink_to(sharded / "gone")
    assert f"{PARTS[1]}: is a link to a file that is gone, 2 tensors are to be in it" in problem(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list where an object"),
        ("{}", "holds no weight_map"),
        ('{"weight_map": {}}', "holds no weight_map"),
        ('{"weight_map": {"a": 3}}', "'a': is given no file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "lies outside the folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "lies outside the folder"),
        ('{"weight_map": {"a": ""}}', "lies outside the folder"),
        ('{"weight_map": {"a": "' + "x" * 300 + '"}}', "has a name that no file has"),
        ('{"weight_map": {"a": "x\\u0000"}}', "has a name that no file has"),
        ('{"weight_map": {"' + "x" * 3000 + '": "x"}}', "is 3000 characters long, more than 1024"),
        ('{"weight_map": {"a": "x"}, "metadata": 3}', "metadata is a int"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_bad_indexes(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    for path in (tmp_path, tmp_path / INDEX):
        assert message in problem(path) and str(tmp_path / INDEX) in problem(path)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000, "\x00"])
def test_bad_configs(tmp_path, text):
    save_file(A, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in problem(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    assert "is not UTF-8" in problem(tmp_path)


# Which files are meant


def test_safetensors_are_read_before_pytorch_files(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    torch.save(B, tmp_path / "pytorch_model.bin")
    with open_source(tmp_path) as source:
        assert set(source.tensors) == A.keys() and "pytorch_model.bin" in source.notes[0]
    assert keys(tmp_path / "pytorch_model.bin") == B.keys()


def test_twins_of_another_precision(tmp_path):
    save_file(A, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file(B, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert keys(tmp_path) == A.keys()
    assert keys(tmp_path, variant="fp16") == B.keys()
    assert "holds no variant 'bf16' (found: '', 'fp16')" in problem(tmp_path, variant="bf16")
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    assert keys(tmp_path) == B.keys()
    save_file(A, tmp_path / "diffusion_pytorch_model.non_ema.safetensors")
    assert "holds the variants fp16, non_ema and none without: choose one by variant=" in problem(tmp_path)


def test_sharded_twins(tmp_path):
    for variant, index, tensors in (("", INDEX, A), (".fp16", "model.safetensors.index.fp16.json", B)):
        names = [f"model{variant}-0000{n}-of-00002.safetensors" for n in (1, 2)]
        (first, one), (second, two) = tensors.items()
        save_file({first: one}, tmp_path / names[0])
        save_file({second: two}, tmp_path / names[1])
        write_index(tmp_path, {first: names[0], second: names[1]}, index)
    assert keys(tmp_path) == A.keys()
    assert keys(tmp_path, variant="fp16") == keys(tmp_path / "model.safetensors.index.fp16.json") == B.keys()


def test_several_files_without_an_index_are_refused_by_name(tmp_path):
    save_file(A, tmp_path / "ae.safetensors")
    save_file(B, tmp_path / "flux1-dev.safetensors")
    text = problem(tmp_path)
    assert (
        f"holds 2 sets of weights and no index that joins them: give one of them, {tmp_path / 'ae.safetensors'}" in text
    )
    assert str(tmp_path / "flux1-dev.safetensors") in text
    assert keys(tmp_path / "ae.safetensors") == A.keys()


def test_one_part_of_a_run_is_refused(sharded):
    assert f"is part 2 of 2: give the folder {sharded} or its index" in problem(sharded / PARTS[1])


def test_a_pipeline_names_its_folders(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    for name in ("transformer", "vae", "scheduler"):
        (tmp_path / name).mkdir()
    save_file(A, tmp_path / "transformer" / "model.safetensors")
    save_file(A, tmp_path / "vae" / "model.safetensors")
    text = problem(tmp_path)
    assert f"give one of its folders that do, {tmp_path / 'transformer'}, {tmp_path / 'vae'}" in text
    assert "scheduler" not in text


def test_nothing_to_read(tmp_path):
    assert "holds no weights (*.safetensors, *.bin" in problem(tmp_path)
    assert "does not exist" in problem(tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "does not exist (a link to a file that is gone)" in problem(tmp_path / "link")
    (tmp_path / "notes.json").write_text("{}")
    assert "holds no weight_map" in problem(tmp_path / "notes.json")
    (tmp_path / ".hidden.safetensors").write_bytes(b"x")
    assert "holds no weights" in problem(tmp_path)


FOREIGN = {
    "GGUF": (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
    "gzip": (b"\x1f\x8b\x08\x00", "compressed by gzip"),
    "tar": (b"sys_info" + b"\0" * 249 + b"ustar\x0000", "tar archive, as PyTorch wrote before 0.1.10"),
    "text": (b"hello world", "is neither a safetensors file nor one of torch.save"),
    "empty": (b"", "size=0: the file is empty"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["model.bin", "model.safetensors", "model"])
def test_other_files_are_refused_by_name(tmp_path, kind, name):
    raw, message = FOREIGN[kind]
    (tmp_path / name).write_bytes(raw)
    if not (kind == "text" and name.endswith("safetensors")):
        assert message in problem(tmp_path / name)
    assert str(tmp_path / name) in problem(tmp_path / name)


def test_a_tar_file_of_the_oldest_pytorch(tmp_path):
    with tarfile.open(tmp_path / "model.pt", "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert "as PyTorch wrote before 0.1.10" in problem(tmp_path / "model.pt")


def test_files_are_closed_when_opening_fails(sharded):
    before = len(os.listdir("/proc/self/fd"))
    (sharded / PARTS[1]).write_bytes(b"{}")
    for _ in range(5):
        problem(sharded)
    assert len(os.listdir("/proc/self/fd")) == before
    save_file(B, sharded / PARTS[1])
    with open_source(sharded):
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


def test_things_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "pipe.safetensors: is not a regular file" in problem(tmp_path / "pipe.safetensors")
    assert "pipe.safetensors: is not a regular file" in problem(tmp_path)
    for path in ("x" * 5000, "a\0b", str(tmp_path / "pipe.safetensors" / "x")):
        assert "does not exist" in problem(path)


def test_many_problems_are_counted(tmp_path):
    write_index(tmp_path, {f"t{n}": f"part{n}.safetensors" for n in range(500)})
    text = problem(tmp_path)
    assert "and 440 more problems" in text and len(text) < 20_000


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    save_file(A, tmp_path / "model.safetensors")
    real = os.open

    def denied(path, *args, **kwargs):
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert f"{tmp_path / 'model.safetensors'}: cannot be opened (Permission denied)" in problem(tmp_path)
