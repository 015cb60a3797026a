"""Two processes of four CPU devices: restore, save, and processes that are late, dead or disagree."""

import shutil
from pathlib import Path

import pytest
import toy_checkpoints as toy
from load_workers import load_workers
from processes import finish, run, start

from shardzoo import checkpoints
from shardzoo.zoo.layout import named
from shardzoo.zoo.mesh import make_mesh

workers = load_workers(Path(__file__).with_name("checkpoint_workers.py"))

LARGER = toy.ToyConfig(layers=4, embed=512, heads=16, kv_heads=4, head_dim=64, mlp=2048, vocab=4096)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    return str(path), toy.write(path, LARGER, assets={"config.json": b"{}"})


def stored_sums(path):
    return {p: leaf.checksum for p, leaf in checkpoints.open(path).manifest.leaves.items()}


def test_exchange():
    for index, result in enumerate(run(workers.exchange, {"count": 5})):
        assert result["rounds"] == [[[0, i], [1, i]] for i in range(5)], index
        assert result["total"] == 28


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 8, "kv_heads": 4},
        {"context": 4, "tensor": 2},
        pytest.param({"data": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_process_reads_what_its_devices_hold(saved, degrees):
    for result in run(workers.restore, {"path": saved[0], "degrees": degrees}):
        assert result["devices"] == 8
        assert result["sums"] == stored_sums(saved[0])
        assert result["held"] <= result["read"] <= 1.02 * result["held"], result
        assert result["largest_array"] == result["largest_shard"], "more of a tensor on the host than a device holds"


def test_saved_by_two_processes_and_restored_by_one_and_by_two(saved, tmp_path):
    to = str(tmp_path / "again")
    run(workers.resave, {"path": saved[0], "to": to, "degrees": {"tensor": 8, "kv_heads": 4}})
    assert stored_sums(to) == stored_sums(saved[0])
    again = checkpoints.open(to)
    assert set(again.assets) == {"config.json"}
    assert again.leaf("embed").provenance == checkpoints.open(saved[0]).leaf("embed").provenance
    for degrees in ({}, {"data": 2, "tensor": 2}):
        model = checkpoints.restore(to, make_mesh(**degrees), verify=True)
        for path, leaf in named(model).items():
            assert leaf.dtype == saved[1][path].dtype
    for result in run(workers.restore, {"path": to, "degrees": {"context": 2, "tensor": 4}}):
        assert result["sums"] == stored_sums(saved[0])


def test_replicated_and_unevenly_owned_leaves_are_written_once(saved, tmp_path):
    for name, degrees in (("a", {"data": 4, "tensor": 2}), ("b", {"context": 8})):
        to = str(tmp_path / name)
        run(workers.resave, {"path": saved[0], "to": to, "degrees": degrees})
        assert stored_sums(to) == stored_sums(saved[0])


def test_every_process_gets_the_error_of_one(saved, tmp_path):
    (tmp_path / "there").mkdir()
    for kind, text in run(
        workers.save_errors, {"path": saved[0], "to": str(tmp_path / "there"), "degrees": {"tensor": 4, "data": 2}}
    ):
        assert kind == "InputError" and "there: exists already" in text


def test_processes_that_are_given_different_things(saved, tmp_path):
    """Nobody waits for one that has failed, and none goes on with parts of two models."""
    copy, (whole, _) = tmp_path / "copy", saved
    shutil.copytree(whole, copy)
    data = bytearray((copy / "params/embed/c/0/0").read_bytes())
    data[100] ^= 1
    (copy / "params/embed/c/0/0").write_bytes(data)
    none, other, same = (str(tmp_path / name) for name in ("none", "other", "same"))
    toy.write(Path(other), LARGER, seed=1)
    shutil.copytree(whole, same)
    plain = [None, None]
    cases = [
        ([str(copy), str(copy)], plain),
        ([whole, none], plain),
        ([none, whole], plain),
        ([whole, other], plain),
        ([whole, whole], ["float32", "bfloat16"]),
        ([whole, same], plain),  # of disks of their own: the same model at another path
    ]
    (tmp_path / "b").mkdir()  # a run's folder that is there already, on a disk that the first process does not see
    arguments = {"cases": cases, "folders": [str(tmp_path / "a"), str(tmp_path / "b")]}
    for found in run(workers.errors_apart, {**arguments, "degrees": {"tensor": 8, "kv_heads": 4}}):
        assert found.pop(-2) is None and {kind for kind, _ in found} == {"InputError"}
        damaged, lacks, lacks_first, values, options, folder = (text for _, text in found)
        assert "process 0: embed: " in damaged and "process 1" not in damaged
        assert f"process 1: {none}: there is no such folder" in lacks and "process 0: " not in lacks
        assert f"process 0: {none}: there is no such folder" in lacks_first and "process 1: " not in lacks_first
        assert "what is restored on process 1 is not that on process 0" in values
        assert "what is restored on process 1 is not that on process 0" in options
        assert "process 1: " in folder and "b: not seen here: use a file system that every process shares" in folder


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_process_that_cannot_write_is_blamed(saved, tmp_path, process):
    arguments = {"path": saved[0], "to": str(tmp_path / "x"), "degrees": {"tensor": 8, "kv_heads": 4}}
    for kind, text in run(workers.one_fails_to_save, {**arguments, "process": process}):
        assert kind == "InputError" and f"process {process}: save: no space left at" in text
        assert f"process {1 - process}" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("process", [0, 1])
def test_a_late_process_is_named_in_time(process):
    seconds = 8
    outcomes = finish(start(workers.late, {"seconds": seconds, "process": process, "timeout": 2}), timeout=90)
    message, took = outcomes[1 - process][1]
    assert f"test: process {process} of 2 did not arrive within 2 s" in message
    assert took < seconds


def test_a_dead_process_ends_a_save_in_an_error_that_names_it(saved, tmp_path):
    to = str(tmp_path / "dead")
    arguments = {"path": saved[0], "to": to, "degrees": {"tensor": 8, "kv_heads": 4}, "process": 1, "timeout": 4}
    alive, dead = finish(start(workers.dies, arguments), timeout=90)
    assert dead[0] == -9
    message, took, exists, unfinished = alive[1]
    assert "save: written: process 1 of 2 did not arrive within 4 s" in message
    assert took < 30 and not exists and not unfinished


@pytest.mark.parametrize(("present", "absent"), [([0, 2], 1), ([1], 0)])
def test_a_process_that_is_not_started_is_named(present, absent):
    handles = start(workers.exchange, {"count": 1}, processes=3, timeout=4, only=present)
    for status, result, text in finish(handles, timeout=60):
        assert status == 1 and result is None
        assert f"ProcessTimeout: distributed: process {absent}" in text and "did not come to" in text
