"""A storage that is full, read-only or fails in the middle: an error that says so, and a later run that carries on."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import toy_checkpoints as toy

from shardzoo import checkpoints
from shardzoo.checkpoints import store
from shardzoo.checkpoints.staging import staging_path
from shardzoo.errors import InputError

CONFIG = toy.ToyConfig(layers=4, embed=256, heads=8, kv_heads=4, head_dim=32, mlp=512, vocab=4096)
SUPPORT = Path(toy.__file__).parent

# Runs in a mount namespace of its own, with a 3 MiB file system at argv[1]: filled up, then with room again.
ON_SMALL_DISK = """
import json, subprocess, sys
sys.path.insert(0, {support!r})
root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", root], check=True)
import toy_checkpoints as toy
from pathlib import Path
from shardzoo import checkpoints
from shardzoo.checkpoints.staging import Staging
from shardzoo.errors import InputError
from test_full_disk_config import CONFIG

seen = {{}}
def attempt(name):
    try:
        toy.write(Path(root) / "c", CONFIG)
        seen[name] = "written"
    except InputError as error:
        seen[name] = str(error)
attempt("refused at the start")
check = Staging.require_space
Staging.require_space = lambda *_: None
attempt("full in the middle")
Staging.require_space = check
seen["looks whole"] = (Path(root) / "c").exists()
subprocess.run(["mount", "-o", "remount,size=16m", root], check=True)
attempt("with room again")
seen["files"] = checkpoints.verify(Path(root) / "c").files
print("RESULT " + json.dumps(seen))
"""


def test_a_full_disk(tmp_path):
    (tmp_path / "test_full_disk_config.py").write_text(f"import toy_checkpoints as toy\nCONFIG = toy.{CONFIG!r}\n")
    (tmp_path / "disk").mkdir()
    namespace = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*namespace, sys.executable, "-c", ON_SMALL_DISK.format(support=str(SUPPORT)), str(tmp_path / "disk")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.split("RESULT ", 1)[1])
    assert "needs" in seen["refused at the start"] and "are free at" in seen["refused at the start"]
    assert "no space left at" in seen["full in the middle"] and "run again" in seen["full in the middle"]
    assert not seen["looks whole"]
    assert seen["with room again"] == "written" and seen["files"] > 10


def test_storage_that_fails_in_the_middle_names_the_leaf(tmp_path):
    """Files beyond a size limit fail as they are written, at the level of the system call."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"embed: the storage failed at .*File too large"):
            toy.write(tmp_path / "c", CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "c").exists() and staging_path(tmp_path / "c").exists()
    toy.write(tmp_path / "c", CONFIG)
    checkpoints.verify(tmp_path / "c")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_used_up_quota_are_told_alike(tmp_path, number):
    tensorstore = ValueError(f"RESOURCE_EXHAUSTED: Failed to write {os.strerror(number)} [os_error_code='{number}']")
    for error in (OSError(number, os.strerror(number)), tensorstore):
        assert str(store.storage_error("embed", error, tmp_path)).startswith(f"embed: no space left at {tmp_path}: ")


def test_a_folder_that_may_not_be_written(tmp_path):
    """Root may write anywhere but below /proc; others are refused by the folder's mode."""
    if os.geteuid() == 0:
        place = Path("/proc")
    else:
        place = tmp_path / "locked"
        place.mkdir(mode=0o500)
    with pytest.raises(InputError, match=r"c: (not allowed to write below|cannot be written below)"):
        toy.write(place / "c", CONFIG)


@pytest.mark.parametrize("name", ["metadata", "config.json", "_CHECKPOINT_METADATA", "commit_success.txt", "zarr.json"])
def test_a_disk_that_fills_up_at_the_end(tmp_path, monkeypatch, name):
    """Every small file that publishing writes may be the one that no longer fits."""
    real = store.write_file

    def full(path, data, **options):
        if path.name == name:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data, **options)

    for module in ("store", "staging"):
        monkeypatch.setattr(sys.modules[f"shardzoo.checkpoints.{module}"], "write_file", full)
    with pytest.raises(InputError, match="no space left at"):
        toy.write(tmp_path / "c", CONFIG, assets={"config.json": b"{}"})
    assert not (tmp_path / "c").exists()
    monkeypatch.undo()
    toy.write(tmp_path / "c", CONFIG, assets={"config.json": b"{}"})
    checkpoints.verify(tmp_path / "c")
