"""Every single-bit flip is found, and missing, extra and truncated files are named."""

import itertools
import json
import os
import random
import shutil

import numpy as np
import pytest
import toy_checkpoints as toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo import checkpoints
from shardzoo.checkpoints.manifest import Manifest, decode
from shardzoo.checkpoints.orbax_layout import CHECKPOINT_METADATA, MANIFEST_FILE
from shardzoo.errors import InputError

TINY = toy.ToyConfig(layers=2, embed=4, heads=2, kv_heads=1, head_dim=2, mlp=4, vocab=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "ckpt"
    toy.write(path, TINY, carried={"x.y": np.arange(3)}, assets={"config.json": b"{}"})
    return path


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def files(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def is_found(path, level):
    try:
        checkpoints.verify(path, level)
    except InputError:
        return True
    return False


def test_whole(tiny):
    for level in ("quick", "full"):
        seen = []
        report = checkpoints.verify(tiny, level, progress=seen.append)
        assert report.files == len(checkpoints.open(tiny).manifest.files) and report.level == level
        assert sum(seen) == (sum(e.spec.nbytes for e in checkpoints.open(tiny).manifest.all_leaves().values())
                             if level == "full" else 0)  # fmt: skip


def flips(root, name, bits):
    """Writes the file with each of `bits` flipped in turn, then as it was."""
    data = (root / name).read_bytes()
    for bit in bits(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (root / name).write_bytes(flipped)
        yield bit
    (root / name).write_bytes(data)


@pytest.fixture
def two_leaves(tmp_path):
    """The smallest checkpoint with everything in it: every bit can be tried."""
    leaves = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "n": np.asarray(np.int16(-5))}
    specs = {name: toy.plain_spec(value) for name, value in leaves.items()}
    carried = {"old.w": toy.plain_spec(np.zeros(3, np.float16))}
    with checkpoints.CheckpointWriter(
        tmp_path / "c", toy.header(TINY), specs, "p", carried=carried, assets={"config.json": b"{}"}
    ) as writer:
        for name, value in {**leaves, checkpoints.carried_path("old.w"): np.ones(3, np.float16)}.items():
            toy.put(writer, name, value)
        writer.publish()
    return tmp_path / "c"


def is_data(name):
    return "/c" in name and not name.startswith("manifest/")


def test_every_bit_of_the_data(two_leaves):
    """Values, checksums of chunks, and indices of the files."""
    tried = 0
    for name in filter(is_data, files(two_leaves)):
        for bit in flips(two_leaves, name, range):
            assert is_found(two_leaves, "full"), (name, bit)
            tried += 1
    assert tried == 8 * (24 + 2 + 6 + 3 * (4 + 20))
    checkpoints.verify(two_leaves)


def test_every_byte_of_the_metadata(two_leaves):
    """One random bit of each byte, of every sixteenth byte in the longest file."""
    rng = random.Random(1)
    for name in itertools.filterfalse(is_data, files(two_leaves)):
        step = 8 * (1 + 15 * ((two_leaves / name).stat().st_size > 1000))
        for bit in flips(two_leaves, name, lambda n, step=step: range(rng.randrange(8), n, step)):
            assert is_found(two_leaves, "quick"), (name, bit)
    checkpoints.verify(two_leaves)


@pytest.mark.slow
def test_every_bit_of_the_metadata(two_leaves):
    for name in itertools.filterfalse(is_data, files(two_leaves)):
        for bit in flips(two_leaves, name, range):
            assert is_found(two_leaves, "quick"), (name, bit)


def test_random_bits_of_a_larger_checkpoint(copy):
    rng = random.Random(0)
    for name in files(copy):
        for bit in flips(copy, name, lambda n: rng.sample(range(n), min(6, n))):
            assert is_found(copy, "full"), (name, bit)
    checkpoints.verify(copy)


def test_every_missing_and_truncated_file_is_named(copy):
    for name in files(copy):
        data = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(InputError, match=name.rsplit("/", 1)[-1]):
            checkpoints.verify(copy, "quick")
        if data:
            (copy / name).write_bytes(data[:-1])
            with pytest.raises(InputError, match=name.rsplit("/", 1)[-1]):
                checkpoints.verify(copy, "quick")
        (copy / name).write_bytes(data)
    checkpoints.verify(copy)


def test_extra_files_and_links_are_named(copy):
    (copy / "params/embed/c/9").write_bytes(b"")
    os.symlink("embed", copy / "params/link")
    (copy / "params/count/zarr.json").rename(copy / "moved")
    os.symlink("../../moved", copy / "params/count/zarr.json")
    with pytest.raises(InputError) as error:
        checkpoints.verify(copy, "quick")
    for part in (
        "params/embed/c/9: not a file of",
        "params/link: not a file of",
        "moved: not",
        "count/zarr.json: -1 b",
    ):
        assert part in str(error.value)


def test_all_problems_come_at_once(copy):
    (copy / "params/embed/zarr.json").unlink()
    (copy / "manifest/assets/config.json").write_bytes(b"[]")
    data = bytearray((copy / "params/count/c").read_bytes())
    data[0] ^= 1
    (copy / "params/count/c").write_bytes(data)
    with pytest.raises(InputError) as error:
        checkpoints.verify(copy)
    assert len(str(error.value).splitlines()) == 4


def test_sound_files_with_the_wrong_values_are_found(copy):
    """Files of equal shape exchanged: every crc32c holds, the leaf's checksum does not."""
    a, b = copy / "params/blocks.q/c/0/0/0/0", copy / "params/blocks.out/c/0/0/0/0"
    first, second = a.read_bytes(), b.read_bytes()
    assert len(first) == len(second)
    a.write_bytes(second)
    b.write_bytes(first)
    checkpoints.verify(copy, "quick")
    with pytest.raises(InputError, match=r"blocks.q: files sound, but not with the values written"):
        checkpoints.verify(copy, "full")


def test_a_newer_version_is_refused_as_such(copy):
    about = (copy / CHECKPOINT_METADATA).read_bytes()
    (copy / CHECKPOINT_METADATA).write_bytes(about.replace(b'"version":1', b'"version":2'))
    with pytest.raises(InputError, match=r"version=2 is newer than this program reads \(1\): upgrade shardzoo"):
        checkpoints.open(copy)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        checkpoints.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        checkpoints.open(tmp_path / "file")
    with pytest.raises(InputError, match="is not a checkpoint"):
        checkpoints.open(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(InputError, match="it holds PyTorch's weights: `shardzoo convert` them first"):
        checkpoints.open(tmp_path)
    (tmp_path / CHECKPOINT_METADATA).write_text('{"custom_metadata": {}}')
    with pytest.raises(InputError, match="has no shardzoo manifest"):
        checkpoints.open(tmp_path)


def test_manifest_goes_to_bytes_and_back(tiny):
    data = (tiny / MANIFEST_FILE).read_bytes()
    manifest = decode(data, "m")
    assert isinstance(manifest, Manifest) and manifest.encode() == data


def test_a_manifest_of_another_shape_is_refused_with_every_problem(tiny):
    record = json.loads((tiny / MANIFEST_FILE).read_bytes())
    record["leaves"]["embed"]["shape"] = [4, "4"]
    record["leaves"]["count"]["dtype"] = "float7"
    record["leaves"]["heads.0"]["folder"] = "../../etc"
    record["leaves"]["blocks.q"]["inner"][0] = 5
    record["leaves"]["blocks.k"]["shape"][0] = 3
    record["sources"] = [{"name": "x"}]
    record["files"]["/etc/passwd"] = {"size": 1}
    record["files"]["params/embed/c/0/0"]["sha256"] = None
    record["surprise"] = 1
    with pytest.raises(InputError) as error:
        decode(json.dumps(record).encode(), "m")
    assert "unknown field 'surprise'" in str(error.value)
    del record["surprise"]
    with pytest.raises(InputError) as error:
        decode(json.dumps(record).encode(), "m")
    for part in ("embed: shape", "count: dtype='float7'", "heads.0: wrong folder", "does not divide outer",
                 "sources[0]: field 'kind'", "/etc/passwd", "'sha256' is None", "blocks.k: its file"):  # fmt: skip
        assert part in str(error.value), part


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_manifest_is_refused_and_nothing_else_happens(tiny, data):
    """One value somewhere in the manifest replaced by any other JSON."""
    record = json.loads((tiny / MANIFEST_FILE).read_bytes())
    at = record
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        below = at[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.integers(0, 3)) == 0:
            break
        at = below
    at[key] = data.draw(JSON)
    try:
        manifest = decode(json.dumps(record).encode(), "m")
    except InputError:
        return
    assert json.loads(manifest.encode()) == record
