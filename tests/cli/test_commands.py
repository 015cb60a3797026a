"""Commands on a small checkpoint: what they print, for people and for scripts, and how they end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toy_checkpoints
from command_line import Ended, invoke

from shardzoo.zoo import layout
from shardzoo.zoo.mesh import Degrees


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "toy"
    toy_checkpoints.write(path, assets={"config.json": b"{}"})
    return path


def flip_a_bit(checkpoint: Path, path: Path) -> str:
    """Copies a checkpoint to `path` with one bit of its largest data file changed; the leaf that it is of."""
    shutil.copytree(checkpoint, path)
    largest = max((path / "params").rglob("c/**/*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return largest.relative_to(path / "params").parts[0]


def refused(ended: Ended, *named: str) -> None:
    """Status 1, a message that names all of `named`, nothing on standard output, no traceback."""
    assert ended.status == 1 and ended.out == ""
    assert ended.err.startswith("error: ") and "Traceback" not in ended.err
    for words in named:
        assert words in ended.err


def test_help_lists_every_command():
    ended = invoke("--help")
    assert ended.status == 0
    for name in ("convert", "inspect", "audit", "verify", "export", "generate", "presets"):
        assert f"\n  {name} " in ended.out
        assert invoke(name, "--help").status == 0


@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("convert", "a"),
        ("convert", "a", "b", "--dtype", "int8"),
        ("convert", "a", "b", "--memory-budget", "lots"),
        ("audit", "toy/small"),
        ("audit", "toy/small", "--mesh", "tensor=x"),
        ("generate", "ckpt", "--temperature", "-1"),
        ("inspect", "--jsn", "ckpt"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_how(words):
    ended = invoke(*words)
    assert ended.status == 2 and ended.out == ""
    assert "Usage: shardzoo" in ended.err and "Traceback" not in ended.err


def test_audit_of_a_mesh_that_fits(checkpoint):
    ended = invoke("audit", "toy/small", "--mesh", "context=2,tensor=4")
    assert ended.status == 0 and ended.err == ""
    assert "context=2,tensor=4: fits 8 devices (context=2, kv=2, rep=2)" in ended.out
    _, mesh, said = ended.out.partition("\ncontext=2,tensor=4")  # before it stands a name, which may be long
    assert invoke("audit", checkpoint, "--mesh", "context=2,tensor=4").out.endswith(mesh + said)


def test_audit_counts_what_each_device_holds():
    declared = toy_checkpoints.Toy.declare(toy_checkpoints.ToyConfig())
    verdict = json.loads(invoke("audit", "toy/small", "--mesh", "data=3,tensor=4", "--json").out)["meshes"][0]
    sizes = Degrees(data=3, tensor=4, kv_heads=2).sizes
    held = 0
    for param in layout.named(declared).values():
        shard = param.nbytes
        for dim in param.names:
            for axis in param.axes(dim):
                shard //= sizes[axis]
        held += shard
    assert verdict["parameter_bytes_per_device"] == held
    assert verdict["axes"] == sizes and verdict["fits"]


def test_audit_names_everything_that_stops_each_mesh_and_what_would_fit():
    ended = invoke("audit", "toy/small", "--mesh", "tensor=2", "--mesh", "tensor=3", "--mesh", "tensor=16")
    assert ended.status == 1
    good, three, sixteen = ended.out.split("tensor=")[1], *ended.out.split("does not fit")[1:]
    assert "fits 2 devices" in good
    for words in (
        "heads=8 does not divide by 3",
        "kv_heads=2 does not divide by tensor=3",
        "vocab=56 does not divide by 3",
    ):
        assert words in three
    assert "mlp=96" not in three and "tensor degrees that fit: 1, 2, 4, 8" in three
    assert "heads=8 does not divide by 16" in sixteen and "(context=2,tensor=8)" in sixteen


def test_audit_says_the_same_to_scripts():
    ended = invoke("audit", "toy/small", "--mesh", "tensor=3", "--mesh", "one", "--json")
    answer = json.loads(ended.out)
    assert ended.status == 1 and answer["family"] == "toy" and answer["kind"] == "preset"
    assert [mesh["fits"] for mesh in answer["meshes"]] == [False, True]
    assert answer["meshes"][0]["tensor_degrees_that_fit"] == [1, 2, 4, 8]
    assert answer["meshes"][1]["parameter_bytes_per_device"] == answer["parameter_bytes"]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("/no/such/folder", "there is no such file or folder"),
        ("toy/smal", "did you mean 'small'?"),
        ("tyo/small", "no preset of that name"),
    ],
)
def test_audit_of_what_is_not_there(target, named):
    refused(invoke("audit", target, "--mesh", "one"), target, named)


def test_inspect_shows_every_parameter(checkpoint):
    ended = invoke("inspect", checkpoint)
    assert ended.status == 0 and ended.err == ""
    rows = [line.split() for line in ended.out.splitlines()]
    declared = layout.named(toy_checkpoints.Toy.declare(toy_checkpoints.ToyConfig()))
    for path, param in declared.items():
        (row,) = [row for row in rows if row[:1] == [path]]
        assert param.dtype.name in row and row[1 : 1 + param.ndim] == list(param.names)
    assert "heads over kv x rep" in ended.out and "kv_heads=2" in ended.out


def test_inspect_gives_scripts_the_manifest(checkpoint):
    answer = json.loads(invoke("inspect", checkpoint, "--json").out)
    assert answer["family"] == "toy" and answer["leaves"]["embed"]["shape"] == [56, 64]


def test_verify_says_that_all_is_whole(checkpoint):
    ended = invoke("verify", checkpoint)
    assert ended.status == 0 and "whole" in ended.out and ended.err == ""
    assert json.loads(invoke("verify", checkpoint, "--json").out)["equal"] is True


def test_verify_names_what_is_damaged(checkpoint, tmp_path):
    damaged = tmp_path / "copy"
    leaf = flip_a_bit(checkpoint, damaged)
    refused(invoke("verify", damaged), f"{damaged}: damaged", f"{leaf}: ")
    refused(invoke("verify", damaged, "--json"), f"{leaf}: ")
    assert invoke("verify", damaged, "--quick").status == 0
    refused(invoke("verify", damaged, tmp_path, "--quick"), "--quick reads no values", "leave out one of the two")


@pytest.mark.parametrize("command", ["inspect", "verify", "generate"])
def test_what_is_not_a_checkpoint_is_named(command, checkpoint, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (tmp_path / "file").write_text("x")
    prompt = ("--prompt", "hi") if command == "generate" else ()
    refused(invoke(command, tmp_path / "absent", *prompt), str(tmp_path / "absent"), "no such folder")
    refused(invoke(command, plain, *prompt), str(plain), "is not a checkpoint")
    refused(invoke(command, tmp_path / "file", *prompt), str(tmp_path / "file"), "is not a folder")


def test_generate_refuses_what_is_not_a_language_model(checkpoint):
    refused(invoke("generate", checkpoint, "--prompt", "hi"), "runs language models", "'toy'")


def test_presets_are_listed_with_their_sizes():
    assert invoke("presets", "toy").out.split() == ["preset", "parameters", "toy/small", "78.4", "K"]
    (only,) = json.loads(invoke("presets", "toy", "--json").out)
    declared = toy_checkpoints.Toy.declare(toy_checkpoints.ToyConfig())
    assert only == {
        "name": "toy/small",
        "parameters": sum(toy_checkpoints.size(param.shape) for param in layout.named(declared).values()),
    }
    refused(invoke("presets", "tyo"), "did you mean 'toy'")


def test_errors_of_the_system_name_the_file(checkpoint, monkeypatch):
    from shardzoo.cli import commands

    def full(*_, **__):
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr(commands, "inspect", full)
    refused(invoke("inspect", checkpoint), "/data/x: No space left on device")


def test_a_bug_of_ours_is_not_dressed_up(checkpoint, monkeypatch):
    from shardzoo.cli import commands

    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(commands, "inspect", broken)
    with pytest.raises(ValueError, match="a bug"):
        invoke("inspect", checkpoint)


def test_little_time_goes_into_looking_for_garbage():
    """What importing JAX makes stays to the end: looked through all the while, and then again, it took 0.4 s."""
    code = """
import atexit, gc
import shardzoo.__main__ as command
import shardzoo.cli.app

looks = []
gc.callbacks.append(lambda phase, info: looks.append(info["generation"]) if phase == "start" else None)

def work(**options):
    from shardzoo.cli import commands
    print(len(looks))

atexit.register(lambda: print(gc.get_freeze_count(), gc.get_count()[0]))
shardzoo.cli.app.app = work
command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    looks, frozen, left = map(int, done.stdout.split())
    assert looks < 100 and frozen > 100_000 and left < 10_000
