"""SIGKILL and Ctrl-C at random moments of convert and export: never something that looks whole and is not, and the
next run writes the same bytes as one that nothing disturbed."""

import random
import shutil
import signal
import threading
import time

import pytest
import tiny_models
from forked import Forks, Moments

from shardzoo import checkpoints
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.errors import InputError

KILLS = 52
IMPORTS = """
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.convert import families
from shardzoo.errors import InputError
families.rules_of("decoder")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A source of several files and MiB, its checkpoint, and both as bytes."""
    folder = tmp_path_factory.mktemp("kill")
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "head_dim": 32}
    before = dict(tiny_models.SIZES)
    tiny_models.SIZES.update(sizes)
    try:
        source = tiny_models.save("qwen3", folder / "source", shard="2MB")
    finally:
        tiny_models.SIZES.update(before)
    convert(source, folder / "ckpt", sync=False)
    return source, folder / "ckpt"


@pytest.fixture
def forks(tmp_path):
    with Forks(IMPORTS, tmp_path / "errors") as server:
        yield server


def seconds(run):
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def check_unfinished(target, staging):
    """What a kill left: nothing under the name, and no reader takes the folder beside it for a checkpoint."""
    assert not target.exists()
    if staging.exists():
        with pytest.raises(InputError, match=r"unfinished|not a checkpoint"):
            checkpoints.open(staging)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_convert_killed_at_random_moments_carries_on_to_the_same_bytes(whole, forks, tmp_path, kill):
    source, ckpt = whole
    wanted = tiny_models.files(ckpt)
    target, staging = tmp_path / "ckpt", tmp_path / "ckpt.orbax-checkpoint-tmp"
    program = f"convert({str(source)!r}, {str(target)!r}, sync=False)"
    assert forks.run(program) == 0
    shutil.rmtree(target)
    longest = seconds(lambda: forks.run(program))
    cut = resumed = 0
    moments = Moments(KILLS, longest, seed=kill)
    for after in moments:
        shutil.rmtree(target, ignore_errors=True)
        if random.Random(after).random() < 0.5:  # else the leavings of several kills add up
            shutil.rmtree(staging, ignore_errors=True)
        status = forks.run(program, kill=kill, after=after)
        if status == 0:
            moments.too_late(after)
            assert tiny_models.files(target) == wanted
            continue
        assert status == (-signal.SIGKILL if kill == signal.SIGKILL else 130), forks.errors()
        cut += 1
        if target.exists():  # killed after the rename
            assert tiny_models.files(target) == wanted
            continue
        check_unfinished(target, staging)
        resumed += convert(source, target, sync=False).bytes_resumed > 0
        assert tiny_models.files(target) == wanted and not staging.exists()
    assert cut > KILLS // 3 and resumed > 0
    assert "Traceback" not in forks.errors()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_export_killed_at_random_moments_carries_on_to_the_same_bytes(whole, forks, tmp_path, kill):
    source, ckpt = whole
    wanted = tiny_models.files(source)
    target, staging = tmp_path / "out", tmp_path / "out.shardzoo-export"
    program = f"export({str(ckpt)!r}, {str(target)!r})"
    assert forks.run(program) == 0
    shutil.rmtree(target)
    longest = seconds(lambda: forks.run(program))
    cut = resumed = 0
    moments = Moments(KILLS, longest, seed=kill)
    for after in moments:
        shutil.rmtree(target, ignore_errors=True)
        status = forks.run(program, kill=kill, after=after)
        if status == 0:
            moments.too_late(after)
        if status == 0 or target.exists():
            assert tiny_models.files(target) == wanted
            continue
        assert status == (-signal.SIGKILL if kill == signal.SIGKILL else 130), forks.errors()
        cut += 1
        if staging.exists() and random.Random(after).random() < 0.5:
            continue  # the leavings of several kills add up
        resumed += export(ckpt, target).bytes_resumed > 0
        assert tiny_models.files(target) == wanted and not staging.exists()
    assert cut > KILLS // 3 and resumed > 0
    assert "Traceback" not in forks.errors()


def test_two_processes_do_not_write_one_destination(whole, forks, tmp_path):
    """A second run while the first is at work is refused, and the first comes out right."""
    source, ckpt = whole
    target = tmp_path / "ckpt"
    asked, first = [], threading.Lock()

    def second(done, total, what):
        with first:
            if not asked:
                asked.append(forks.run(f"convert({str(source)!r}, {str(target)!r})"))

    convert(source, target, sync=False, progress=second)
    assert asked == [1] and "another process is writing it" in forks.errors()
    assert tiny_models.files(target) == tiny_models.files(ckpt)
    asked.clear()

    def another(done, total, what):
        with first:
            if not asked:
                asked.append(forks.run(f"export({str(ckpt)!r}, {str(tmp_path / 'out')!r})"))

    export(ckpt, tmp_path / "out", progress=another)
    assert asked == [1] and tiny_models.files(tmp_path / "out") == tiny_models.files(source)


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
{program}
"""


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_write_that_fails_ends_in_one_line_and_can_be_carried_on(whole, forks, tmp_path, share):
    """A file that cannot grow past a limit stands for every failing write."""
    source, ckpt = whole
    largest = max(f.stat().st_size for f in ckpt.rglob("*") if f.is_file())
    program = f"convert({str(source)!r}, {str(tmp_path / 'ckpt')!r}, sync=False)"
    assert forks.run(LIMITED.format(limit=int(share * largest), program=program)) == 1
    assert not (tmp_path / "ckpt").exists()
    assert "the storage failed" in forks.errors() and "Traceback" not in forks.errors()
    convert(source, tmp_path / "ckpt", sync=False)
    assert tiny_models.files(tmp_path / "ckpt") == tiny_models.files(ckpt)
    largest = max(f.stat().st_size for f in source.rglob("*") if f.is_file())
    program = f"export({str(ckpt)!r}, {str(tmp_path / 'out')!r})"
    assert forks.run(LIMITED.format(limit=int(share * largest), program=program)) == 1
    assert not (tmp_path / "out").exists() and "Traceback" not in forks.errors()
    export(ckpt, tmp_path / "out")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(source)


def test_a_folder_that_may_not_be_written_is_refused(whole, tmp_path):
    source, ckpt = whole
    for run in (
        lambda to: convert(source, to),
        lambda to: convert(source, to, dry_run=True),
        lambda to: export(ckpt, to),
    ):
        with pytest.raises(InputError, match=r"/proc"):
            run("/proc/ckpt")
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match=r"file"):
            run(tmp_path / "file" / "ckpt")
