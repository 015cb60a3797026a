"""The streaming writer: what it writes, resuming, refusing."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import toy_checkpoints as toy

from shardzoo import checkpoints
from shardzoo.checkpoints import orbax_layout, staging
from shardzoo.checkpoints.journal import Journal
from shardzoo.checkpoints.staging import JOURNAL, staging_path
from shardzoo.errors import InputError

CARRIED = {"rotary.inv_freq": np.arange(7, dtype=np.float32), "rotary": np.ones((2, 3), ml_dtypes.bfloat16)}


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_what_is_written_is_read_back(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assets = {"config.json": tmp_path / "config.json", "tok/vocab.txt": b"a\nb\n"}
    stored = toy.write(tmp_path / "ckpt", carried=CARRIED, assets=assets)
    ckpt = checkpoints.open(tmp_path / "ckpt")
    assert ckpt.family.name == "toy" and ckpt.config == toy.ToyConfig()
    for path, value in stored.items():
        got = ckpt.read(path)
        assert got.dtype == value.dtype and got.shape == value.shape
        assert got.tobytes() == value.tobytes(), path
    part = (slice(1, 3), slice(2, 7), slice(3, 4), slice(0, 64))
    np.testing.assert_array_equal(ckpt.read("blocks.q", part), stored["blocks.q"][part])
    assert {n: p.read_bytes() for n, p in ckpt.assets.items()} == {
        "config.json": b'{"a": 1}',
        "tok/vocab.txt": b"a\nb\n",
    }
    assert not staging_path(tmp_path / "ckpt").exists()
    leaf = ckpt.leaf("blocks.q")
    assert leaf.spec.split["heads"] == ("kv", "rep") and leaf.provenance[0]["key"] == "blocks.q"


def test_manifest_lists_exactly_the_files(tmp_path):
    toy.write(tmp_path / "ckpt", carried=CARRIED, assets={"x": b"x"})
    listed = checkpoints.open(tmp_path / "ckpt").manifest.files
    found = {n: len(d) for n, d in tree(tmp_path / "ckpt").items()}
    others = {orbax_layout.MANIFEST_FILE, orbax_layout.CHECKPOINT_METADATA, *orbax_layout.MARKERS}
    assert {n: e.size for n, e in listed.items()} == {n: s for n, s in found.items() if n not in others}


def test_two_runs_write_the_same_bytes(tmp_path):
    toy.write(tmp_path / "a", carried=CARRIED)
    toy.write(tmp_path / "b", carried=CARRIED, budget=1, sync=False)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def start(dst, plan="plan", **options):
    return checkpoints.CheckpointWriter(
        dst, toy.header(), toy.specs_of(toy.Toy.declare(toy.ToyConfig())), plan, **options
    )


def test_an_interrupted_run_is_carried_on_with_the_same_bytes(tmp_path):
    toy.write(tmp_path / "whole")
    stored = toy.values(toy.Toy.declare(toy.ToyConfig()))
    with start(tmp_path / "ckpt") as writer:
        for path in list(stored)[:4]:
            toy.put(writer, path, stored[path])
        writer.note("digests", {"a": 1})
        block = next(writer.grid("blocks.up").blocks())
        writer.write("blocks.up", block, stored["blocks.up"][block])
    journal = staging_path(tmp_path / "ckpt") / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"leaf":"blo')
    with pytest.raises(InputError, match="no such folder"):
        checkpoints.open(tmp_path / "ckpt")
    with pytest.raises(InputError, match="unfinished"):
        checkpoints.open(staging_path(tmp_path / "ckpt"))
    with start(tmp_path / "ckpt") as writer:
        assert writer.done == set(list(stored)[:4]) and writer.notes == {"digests": {"a": 1}}
        for path in stored:
            if path not in writer.done:
                toy.put(writer, path, stored[path])
        writer.publish()
    assert tree(tmp_path / "ckpt") == tree(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncate", "remove", "extra"])
def test_a_leaf_whose_files_changed_is_written_again(tmp_path, damage):
    with start(tmp_path / "ckpt") as writer:
        toy.put(writer, "embed", toy.values(toy.Toy.declare(toy.ToyConfig()))["embed"])
    file = staging_path(tmp_path / "ckpt") / "params/embed/c/0/0"
    if damage == "truncate":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "remove":
        file.unlink()
    else:
        (file.parent / "0.__lock").write_bytes(b"")
    with start(tmp_path / "ckpt") as writer:
        assert not writer.done
        first = next(writer.grid("embed").blocks())
        assert writer.has("embed", first) == (damage == "extra")
    assert file.exists() == (damage == "extra") and not (file.parent / "0.__lock").exists()


def test_another_plan_or_restart_starts_again(tmp_path):
    for options in ({"plan": "other"}, {"plan": "other", "restart": True}):
        with start(tmp_path / "ckpt") as writer:
            toy.put(writer, "embed", toy.values(toy.Toy.declare(toy.ToyConfig()))["embed"])
        with start(tmp_path / "ckpt", **options) as writer:
            assert not writer.done


def test_a_damaged_journal_is_believed_up_to_the_damage(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, "p")
    for i in range(5):
        journal.add({"leaf": str(i)})
    journal.close()
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    for bit in range(0, len(whole) * 8, 7):  # in every byte, all of the eight in turn
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        line = whole[: bit // 8].count(b"\n")
        again = Journal(path, "p")
        again.close()
        assert len(again.records) == max(0, line - 1), (bit, lines[line])


def test_refusals_before_anything_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there: exists already: remove it"):
        start(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"):
        start(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written below .*choose another destination"):
        start(tmp_path / "file" / "ckpt")
    other = staging_path(tmp_path / "theirs")
    other.mkdir()
    (other / "data").write_text("not ours")
    with pytest.raises(InputError, match="left by another program"):
        start(tmp_path / "theirs")
    assert (other / "data").exists()
    with start(tmp_path / "held"), pytest.raises(InputError, match="another process is writing it"):
        start(tmp_path / "held")
    with start(tmp_path / "held"):
        pass


def write_all(writer):
    for path, value in toy.values(toy.Toy.declare(toy.ToyConfig())).items():
        toy.put(writer, path, value)


def test_no_other_process_comes_in_while_one_publishes(tmp_path, monkeypatch):
    rename, refused = os.rename, []

    def contended(old, new):
        for _ in range(2):
            with pytest.raises(InputError) as error:
                start(tmp_path / "ckpt")
            refused.append(str(error.value))
            if len(refused) == 1:
                rename(old, new)

    monkeypatch.setattr(staging.os, "rename", contended)
    with start(tmp_path / "ckpt") as writer:
        write_all(writer)
        writer.publish()
    assert "another process is writing it" in refused[0] and "exists already" in refused[1]
    checkpoints.verify(tmp_path / "ckpt")


@pytest.mark.parametrize("end", ["publish", "discard"])
def test_a_folder_that_is_gone_by_the_time_it_is_locked_is_left_alone(tmp_path, monkeypatch, end):
    lock = staging.fcntl.flock
    with start(tmp_path / "ckpt") as writer:
        write_all(writer)

        def late(handle, how):
            monkeypatch.undo()
            getattr(writer, end)()
            lock(handle, how)

        monkeypatch.setattr(staging.fcntl, "flock", late)
        with pytest.raises(InputError, match="another process is writing it"):
            start(tmp_path / "ckpt")
    if end == "publish":
        checkpoints.verify(tmp_path / "ckpt")
    else:
        assert list(tmp_path.iterdir()) == []


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path):
    stored = toy.values(toy.Toy.declare(toy.ToyConfig()))
    with start(tmp_path / "ckpt") as writer:
        for path, value in stored.items():
            toy.put(writer, path, value)
        (tmp_path / "ckpt").mkdir()
        with pytest.raises(InputError, match="exists already"):
            writer.publish()
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_names_and_dtypes_that_cannot_be_stored_are_refused_at_once(tmp_path):
    good = checkpoints.LeafSpec(dims=("d",), shape=(2,), dtype=np.dtype("float32"))
    bad = checkpoints.LeafSpec(dims=("d",), shape=(2,), dtype=np.dtype("complex128"))
    with pytest.raises(InputError) as error:
        checkpoints.CheckpointWriter(
            tmp_path / "c", toy.header(), {"a": good, "a.b": good, "..": good, "x/y": good, "": good, "z": bad}, "p"
        )
    for part in ("a.b: 'a' is a leaf too", "'..'", "'x/y'", "'': is not", "z: dtype=complex128"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_blocks_off_the_grid_or_written_twice_are_refused(tmp_path):
    stored = toy.values(toy.Toy.declare(toy.ToyConfig()))
    with start(tmp_path / "ckpt") as writer:
        a = stored["embed"]
        with pytest.raises(ValueError, match="not whole files"):
            writer.write("embed", (slice(0, 3), slice(0, 64)), a[:3])
        with pytest.raises(ValueError, match="not whole files"):
            writer.write("embed", (slice(0, 56), slice(0, 64)), a.astype(np.float32))
        writer.write("embed", (slice(0, 56), slice(0, 64)), a)
        with pytest.raises(ValueError, match="written before"):
            writer.write("embed", (slice(0, 56), slice(0, 64)), a)
        with pytest.raises(ValueError, match="not finished"):
            writer.publish()
        with pytest.raises(ValueError, match="were not written"):
            writer.finish_leaf("blocks.q")


def test_plain_json_readers_see_the_manifest(tmp_path):
    toy.write(tmp_path / "ckpt")
    manifest = json.loads((tmp_path / "ckpt/manifest/metadata").read_text())
    assert manifest["family"] == "toy" and manifest["leaves"]["embed"]["dims"] == "vocab embed"
    zarr = json.loads((tmp_path / "ckpt/params/blocks.q/zarr.json").read_text())
    assert zarr["dimension_names"] == ["layer", "heads", "head_dim", "embed"]


def test_what_an_interrupted_clean_up_leaves_is_taken_over(tmp_path):
    """A write under way when a run is interrupted may come back after the journal is gone."""
    left = staging_path(tmp_path / "ckpt") / "params" / "embed" / "c"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"half")
    toy.write(tmp_path / "ckpt")
    checkpoints.verify(tmp_path / "ckpt")
