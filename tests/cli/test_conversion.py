"""convert, verify and export from the command line: the way there and back, and what a user can get wrong."""

import filecmp
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import tiny_llama
import tiny_models
import torch
from command_line import Ended, invoke, run, start


@pytest.fixture
def source(tmp_path) -> Path:
    return tiny_llama.write(tmp_path / "source")


@pytest.fixture
def checkpoint(source, tmp_path) -> Path:
    assert invoke("convert", source, tmp_path / "ckpt").status == 0
    return tmp_path / "ckpt"


def refused(ended: Ended, *named: object) -> None:
    assert ended.status == 1 and ended.out == "", ended
    assert ended.err.startswith("error: ") and "Traceback" not in ended.err
    for words in named:
        assert str(words) in ended.err


def test_there_and_back_bit_for_bit(source, checkpoint, tmp_path):
    ended = invoke("verify", checkpoint, source)
    assert ended.status == 0 and "21 tensors" in ended.out
    ended = invoke("export", checkpoint, tmp_path / "exported")
    assert ended.status == 0 and "bit for bit: model.safetensors" in ended.out
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert filecmp.cmpfiles(source, tmp_path / "exported", names, shallow=False)[0] == names


def test_what_convert_says(source, tmp_path):
    ended = invoke("convert", source, tmp_path / "ckpt")
    assert ended.status == 0 and ended.err == ""
    assert "decoder, layout transformers, every bit kept" in ended.out
    assert (
        "\n21 tensors (" in ended.out
        and " are 10 arrays (" in ended.out
        and f"on disk) in {tmp_path / 'ckpt'}" in ended.out
    )


def test_dry_run_writes_nothing(source, tmp_path):
    ended = invoke("convert", source, tmp_path / "ckpt", "--dry-run")
    assert ended.status == 0 and "would be 10 arrays" in ended.out and "would take about" in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_json_is_the_report(source, tmp_path):
    answer = json.loads(invoke("convert", source, tmp_path / "ckpt", "--json").out)
    assert answer["family"] == "decoder" and answer["tensors"] == 21 and answer["dry_run"] is False
    answer = json.loads(invoke("export", tmp_path / "ckpt", tmp_path / "out", "--json").out)
    assert answer["identical"] == ["model.safetensors"]
    assert json.loads(invoke("verify", tmp_path / "ckpt", source, "--json").out)["equal"] is True


def test_a_cast_is_said(source, tmp_path):
    ended = invoke("convert", source, tmp_path / "ckpt", "--dtype", "f32")
    assert "floats cast to float32" in ended.out
    assert "after the cast to float32" in invoke("verify", tmp_path / "ckpt", source).out
    leaves = json.loads(invoke("inspect", tmp_path / "ckpt", "--json").out)["leaves"]
    assert {leaf["dtype"] for leaf in leaves.values()} == {"float32"}


def test_overwrite(source, checkpoint, tmp_path):
    refused(invoke("convert", source, checkpoint), checkpoint, "exists already")
    assert invoke("convert", source, checkpoint, "--overwrite", "--dtype", "f32").status == 0
    assert "float32" in invoke("inspect", checkpoint).out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "source"]


def test_a_destination_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("x")
    refused(invoke("convert", source, tmp_path / "file" / "ckpt"), tmp_path / "file")
    refused(invoke("convert", source, tmp_path / "file"), tmp_path / "file")
    refused(invoke("convert", source, "/proc/ckpt"), "/proc")


def test_a_source_that_is_not_there(tmp_path):
    refused(invoke("convert", tmp_path / "absent", tmp_path / "ckpt"), tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    refused(invoke("convert", tmp_path / "empty", tmp_path / "ckpt"), tmp_path / "empty")


def test_a_hub_that_cannot_be_reached(tmp_path):
    """A whole download is tested with the readers, against a server."""
    refused(invoke("convert", "hf://owner/name", tmp_path / "ckpt"), "hf://owner/name", "HF_HUB_OFFLINE")
    refused(invoke("audit", "hf://owner/name", "--mesh", "one"), "hf://owner/name")
    refused(invoke("convert", "hf://owner", tmp_path / "ckpt"), "hf://owner/name[@revision][/folder]")


def test_one_of_several_dicts_in_a_file_is_selected(tmp_path):
    """Both dicts have the same keys and shapes: only the choice tells which values are meant."""
    source = tiny_llama.write(tmp_path / "source")
    dicts = {name: tiny_llama.tensors(seed) for seed, name in enumerate(("ema", "state"))}
    as_torch = {
        name: {key: torch.from_numpy(value.astype("float32")) for key, value in weights.items()}
        for name, weights in dicts.items()
    }
    refused(invoke("convert", source, tmp_path / "ckpt", "--select", "ema"), "select='ema'", "is a safetensors file")
    (source / "model.safetensors").unlink()
    torch.save(as_torch, source / "pytorch_model.bin")
    refused(invoke("convert", source, tmp_path / "ckpt", "--select", "none"), "select='none'")
    refused(invoke("audit", source, "--mesh", "one"), "--select")
    for name in dicts:
        assert invoke("convert", source, tmp_path / name, "--select", name).status == 0
        assert invoke("verify", tmp_path / name, source, "--select", name).status == 0
        assert invoke("audit", source, "--mesh", "one", "--select", name).status == 0
    refused(invoke("verify", tmp_path / "ema", source, "--select", "state"), "differs from")
    ended = invoke("verify", tmp_path / "ema", "--select", "ema")
    assert ended.status == 2 and "about SRC" in ended.err


def test_one_of_several_variants_is_chosen(source, tmp_path):
    shutil.copy(source / "model.safetensors", source / "model.bf16.safetensors")
    (source / "model.safetensors").rename(source / "model.fp16.safetensors")
    refused(invoke("convert", source, tmp_path / "ckpt"), "fp16", "variant=")
    refused(invoke("audit", source, "--mesh", "one"), "--variant")
    assert invoke("audit", source, "--mesh", "one", "--variant", "fp16").status == 0
    assert invoke("convert", source, tmp_path / "ckpt", "--variant", "fp16").status == 0
    assert invoke("verify", tmp_path / "ckpt", source, "--variant", "fp16").status == 0


def test_every_misfit_in_one_message(tmp_path):
    weights = tiny_llama.tensors()
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:3]
    weights["model.layers.0.extra"] = weights["lm_head.weight"]
    source = tiny_llama.write(tmp_path / "source", weights)
    for command in (("convert", source, tmp_path / "ckpt"), ("audit", source, "--mesh", "one")):
        refused(
            invoke(*command),
            *("model.norm.weight: missing", "model.layers.1.mlp.up_proj.weight: shape (3, 16)"),
            "model.layers.0.extra: not known",
        )
    assert not (tmp_path / "ckpt").exists()


def test_a_config_that_does_not_match_the_tensors(tmp_path):
    source = tiny_llama.write(tmp_path / "source", num_hidden_layers=3, intermediate_size=32)
    refused(invoke("convert", source, tmp_path / "ckpt"), "model.layers.2", "shape (24, 16)", "(32, 16)")


def test_audit_counts_the_bytes_that_a_source_holds(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")  # in bfloat16
    assert invoke("convert", source, tmp_path / "ckpt").status == 0
    said = [json.loads(invoke("audit", tmp_path / name, "--mesh", "one", "--json").out) for name in ("source", "ckpt")]
    assert said[0]["parameter_bytes"] == said[1]["parameter_bytes"] == 2 * said[0]["parameters"]


def test_audit_reads_a_source_as_convert_does(source, checkpoint, tmp_path):
    named = invoke("audit", source, "--mesh", "one").out.splitlines()[1:]
    (source / "config.json").rename(tmp_path / "named.json")
    refused(invoke("audit", source, "--mesh", "one"), "--config")
    options = ("--config", tmp_path / "named.json", "--family", "decoder", "--component", "language_model")
    assert invoke("audit", source, "--mesh", "one", *options).out.splitlines()[1:] == named
    refused(invoke("audit", source, "--mesh", "one", *options, "--prefix", "net."), "prefix='net.'")
    refused(invoke("audit", checkpoint, "--mesh", "one", "--variant", "fp16"), "no PyTorch source", "--variant")
    refused(invoke("audit", tmp_path / "none", "--mesh", "one", "--variant", "fp16"), "no such file")


def test_a_truncated_file_is_named(source, tmp_path):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(invoke("convert", source, tmp_path / "ckpt"), path.name)


def test_a_checkpoint_that_differs_from_its_source(source, checkpoint, tmp_path):
    other = tiny_llama.write(tmp_path / "other", tiny_llama.tensors(seed=1))
    refused(invoke("verify", checkpoint, other), "differs from", "lm_head.weight")


def test_options_that_do_not_exist_for_this_source(source, checkpoint, tmp_path):
    refused(invoke("convert", source, tmp_path / "x", "--family", "decodr"), "family='decodr'")
    refused(invoke("convert", source, tmp_path / "x", "--component", "vae"), "component='vae'")
    refused(invoke("convert", source, tmp_path / "x", "--config", tmp_path / "no.json"), tmp_path / "no.json")
    refused(invoke("export", checkpoint, tmp_path / "x", "--layout", "original"), "layout='original'")
    refused(invoke("convert", source, tmp_path / "x", "--memory-budget", "1k"), "memory_budget=1000")
    assert not (tmp_path / "x").exists()


def test_interrupted_convert_says_so_and_carries_on(smollm2_folder, tmp_path):
    """Ctrl-C when part of the weights is written: status 130, no traceback, nothing that looks whole; then resume."""
    checkpoint = tmp_path / "ckpt"
    process = start("convert", smollm2_folder, checkpoint)
    deadline = time.monotonic() + 120
    while not written(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "", (out, err)
    assert err == "error: interrupted: the same command carries on from here; with --no-resume it starts clean\n"
    assert not checkpoint.exists()
    ended = run("convert", smollm2_folder, checkpoint)
    assert ended.status == 0 and ended.err == "", ended.err
    assert "were there from an interrupted run" in ended.out
    assert run("verify", checkpoint, smollm2_folder).status == 0


def written(folder: Path) -> int:
    """Data files of an unfinished run."""
    return sum("c" in path.parts for path in folder.rglob("*") if path.is_file())


def test_output_into_a_closed_pipe_is_quiet(checkpoint):
    read, write = os.pipe()
    os.close(read)
    process = start("inspect", checkpoint, "--json", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err and process.returncode == 1
