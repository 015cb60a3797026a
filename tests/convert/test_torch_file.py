"""PyTorch files, zip and older, read without PyTorch: bits as saved and as `torch.load` reads them, or `InputError`."""

import collections
import os
import pickle
import random
import struct
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.convert import file_bytes
from shardzoo.convert.file_bytes import read_stored, release_stored
from shardzoo.convert.source import open_source
from shardzoo.convert.torch_file import open_torch_file
from shardzoo.convert.weight_file import open_weight_file
from shardzoo.errors import InputError

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip
# PyTorch saves these in the older form and then fails to load them; here they are read.
UNTYPED = [name for name in DTYPES if name.startswith(("float8", "uint")) and name != "uint8"]
FORMS = ("zip", "legacy")
STRATEGIES = ("mmap", "pread")


def save(value, path: Path, form: str = "zip", **options) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=form == "zip", **options)
    return path


def random_tensor(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    kind = getattr(torch, dtype)
    size = torch.empty((), dtype=kind).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator).view(kind)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a (4, 6, 5) tensor of every kind: all share one storage."""
    return {
        "whole": base,
        "slice of rows": base[1:3],
        "slice of columns": base[:, 2:5],
        "steps": base[::2, 1::3, ::2],
        "transposed": base.transpose(0, 1),
        "reversed dims": base.permute(2, 1, 0),
        "matrix transposed": base[0].t(),
        "expanded new": base[0].expand(3, 6, 5),
        "expanded inside": base[:, :1].expand(4, 7, 5),
        "expanded scalar": base[1, 2, 3].expand(2, 2),
        "element": base[1, 2, 3],
        "column": base[:, 3, 2],
        "diagonal": base[0].diagonal(),
        "windows": base.reshape(-1).unfold(0, 7, 3),
        "split dims": base.view(2, 2, 6, 5).transpose(1, 2),
        "empty": base[2:2],
        "size one": base[1:2].transpose(0, 2),
    }


def assert_equal(path: Path, expected: dict[str, torch.Tensor], strategy: str, **options) -> None:
    with open_source(path, strategy=strategy, **options) as source:
        assert list(source.tensors) == list(expected)
        for key, tensor in expected.items():
            array = source.read(key)
            info = source.tensors[key]
            assert info.shape == array.shape == tuple(tensor.shape), key
            assert info.dtype == array.dtype and info.nbytes == array.nbytes == len(bits(tensor)), key
            assert array.flags.c_contiguous and array.flags.aligned, key
            assert array.tobytes() == bits(tensor), key
            if tensor.ndim and len(tensor) > 1:
                rows = slice(1, len(tensor))
                assert source.read(key, rows).tobytes() == bits(tensor[1:]), key
            source.release(key)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_view_equals_torch_load(tmp_path, dtype, form, strategy):
    expected = views(random_tensor(dtype, 4, 6, 5))
    path = save(expected, tmp_path / "a.pth", form)
    assert_equal(path, expected, strategy)
    if form == "zip" or dtype not in UNTYPED:
        assert_equal(path, torch.load(path, weights_only=False), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_small_gather_equals_torch_load(tmp_path, monkeypatch, strategy):
    """Strided tensors are copied in pieces of 16 MiB: with pieces of a few bytes every way to cut them runs."""
    path = save(views(random_tensor("float32", 4, 6, 5)), tmp_path / "a.pth")
    for size in (4, 7, 40, 100, 300):
        monkeypatch.setattr(file_bytes, "GATHER_BYTES", size)
        assert_equal(path, torch.load(path, weights_only=False), strategy)


@pytest.mark.parametrize("form", FORMS)
def test_packed_4_bit_floats(tmp_path, form):
    raw = torch.tensor([[0x21, 0x43], [0xF5, 0x78]], dtype=torch.uint8)
    path = save({"w": raw.view(torch.float4_e2m1fn_x2)}, tmp_path / "a.pth", form)
    with open_source(path) as source:
        assert source.tensors["w"].dtype == ml_dtypes.float4_e2m1fn and source.tensors["w"].nbytes == 4
        whole = source.read("w").astype(np.float32)
        np.testing.assert_array_equal(whole, [[0.5, 1, 1.5, 2], [3, -6, -0.0, 6]])
        np.testing.assert_array_equal(source.read("w", slice(1, 2)).astype(np.float32), whole[1:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_modules_parameters_and_tied_weights(tmp_path, form, protocol):
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    module[1].weight = module[0].weight
    noted = torch.nn.Parameter(torch.randn(3))
    noted.remark = "an attribute"
    state = collections.OrderedDict([*module.state_dict().items(), ("noted", noted)])
    path = save(state, tmp_path / "a.pth", form, pickle_protocol=protocol)
    assert_equal(path, torch.load(path, weights_only=False), "mmap")
    with open_source(path) as source:
        memory = {key: info.memory for key, info in source.tensors.items()}
    assert memory["0.weight"] == memory["1.weight"]
    assert len(set(memory.values())) == len(memory) - 1


@pytest.mark.parametrize("form", FORMS)
def test_plain_values_beside_the_tensors_are_left_out(tmp_path, form):
    state = {"w": torch.ones(2), "step": 3, "name": "x", "none": None, "scale": np.float32(2)}
    path = save(state, tmp_path / "a.pth", form)
    with open_source(path) as source:
        assert list(source.tensors) == ["w"]
        assert "step (int), name (str)" in "\n".join(source.notes)


def test_torch_is_not_imported(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "a.pth")
    save({"w": torch.ones(2)}, tmp_path / "b.pth", "legacy")
    script = """
        import sys
        from shardzoo.convert.source import open_source
        for path in sys.argv[1:]:
            with open_source(path) as source:
                assert source.read("w").tolist() == [1, 1]
        assert "torch" not in sys.modules and "pickle" not in open_source.__globals__
    """
    paths = [str(tmp_path / "a.pth"), str(tmp_path / "b.pth")]
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), *paths], check=True, timeout=60)


# Which dict of the file is read

W = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(3)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
CHOSEN = {
    "bare": (W, ()),
    "wrapped": ({"state_dict": W}, ("state_dict",)),
    "wrapped twice": ({"model": {"module": W}}, ("model", "module")),
    "beside training state": (
        {"model": W, "optimizer": OPTIMIZER, "epoch": 3, "lr_scheduler": {"t": torch.ones(1)}},
        ("model",),
    ),
    "beside numbers": (
        {"model": W, "step": torch.tensor(7), "loss": torch.tensor(0.5), "torch_rng_state": torch.zeros(9)},
        ("model",),
    ),
    "beside plain dicts": ({"state_dict": W, "hyper_parameters": {"depth": 2}, "names": ["a"]}, ("state_dict",)),
    "a name of one's own": ({"my_net": W, "version": "1"}, ("my_net",)),
    "a list of one": ([W], ("0",)),
    "training state in a list": ({"optimizer_states": [OPTIMIZER], "state_dict": W}, ("state_dict",)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CHOSEN)
def test_a_single_candidate_is_entered(tmp_path, case, form):
    value, wrapper = CHOSEN[case]
    path = save(value, tmp_path / "a.pth", form)
    with open_source(path) as source:
        assert list(source.tensors) == list(W) and source.files[0].wrapper == wrapper
        notes = "\n".join(source.notes)
        assert (f"read from the wrapper {'/'.join(wrapper)}" in notes) == bool(wrapper)
        assert ("not read: optimizer (1 tensors)" in notes) == (case == "beside training state")


DOUBTFUL = {
    "weights and average": ({"model": W, "ema": W}, r"model \(2 tensors\), ema \(2 tensors\).*select='model'"),
    "under a wrapper": (
        {"state": {"net": W, "net_ema": W}},
        r"under state: state/net .*state/net_ema .*select='state/net'",
    ),
    "beside tensors": ({"w": torch.ones(1), "ema": W}, r"beside 1 tensors of its own: ema \(2 tensors\)"),
    "training state only": ({"optimizer": OPTIMIZER}, r"only where training state is kept: optimizer \(1 tensors\)"),
    "two of one's own": ({"encoder": W, "decoder": W}, r"encoder \(2 tensors\), decoder"),
    "no tensors": ({"a": 1}, "holds no tensors .its top level is a dict"),
    "nothing": (None, "holds no tensors .its top level is a NoneType"),
    "tensor alone": (torch.ones(2), "single tensor without a name"),
    "tensors in a list": ([torch.ones(2), torch.ones(3)], "2 tensors in a list, without names"),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_several_candidates_are_listed(tmp_path, case):
    value, message = DOUBTFUL[case]
    path = save(value, tmp_path / "a.pth")
    with pytest.raises(InputError, match=message) as error:
        open_source(path)
    assert str(path) in str(error.value)


def test_a_selection_is_followed(tmp_path):
    other = {"layer.weight": torch.full((2, 3), 2.0), "layer.bias": torch.ones(3)}
    value = {"model": W, "ema": {"shadow/fast": other}, "steps": [W, other]}
    path = save(value, tmp_path / "a.pth")
    assert_equal(path, W, "mmap", select="model")
    assert_equal(path, other, "mmap", select="ema/shadow/fast")
    assert_equal(path, other, "mmap", select="steps/1")
    assert_equal(path, {f"shadow/fast.{key}": tensor for key, tensor in other.items()}, "mmap", select="ema")
    with open_source(path, select="/") as source:
        assert list(source.tensors)[:3] == ["model.layer.weight", "model.layer.bias", "ema.shadow/fast.layer.weight"]
        assert len(source.tensors) == 8
    with pytest.raises(InputError, match=r"select='ema/slow': ema holds no 'slow' \(it holds shadow/fast\)"):
        open_source(path, select="ema/slow")
    with pytest.raises(InputError, match=r"model/layer\.bias is a tensor, not a dict"):
        open_source(path, select="model/layer.bias")
    with pytest.raises(InputError, match="holds no tensors"):
        open_source(save({"a": {"b": 1}, "w": torch.ones(1)}, path), select="a")


@pytest.mark.parametrize("name", ["a\x1b[2J", "n" * 2000, "\u202e"])
def test_names_that_cannot_be_shown_are_refused(tmp_path, name):
    path = save({name: torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(InputError, match="characters") as error:
        open_source(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    for value in ({"model": {"w": torch.ones(1)}, name: {"w": torch.ones(1)}}, {"w": torch.ones(1), "x": {name: 1}}):
        with pytest.raises(InputError) as error:
            open_source(save(value, path))
        assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_names_that_meet_when_joined_are_refused(tmp_path):
    path = save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"two tensors are named 'a\.b'"):
        open_source(path, select="/")
    with pytest.raises(InputError, match="differ only in type"):
        open_source(save({1: torch.ones(1), "1": torch.ones(1)}, path), select="/")


# What torch can save and this does not read


class Tagged(torch.Tensor):
    pass


def _kinds() -> dict[str, tuple[object, str]]:
    return {
        "sparse": (torch.eye(3).to_sparse(), r"a sparse tensor \(call to_dense"),
        "sparse rows": (torch.eye(3).to_sparse_csr(), r"a sparse tensor \(call to_dense"),
        "meta": (torch.zeros(3, device="meta"), "a meta tensor, which holds no data"),
        "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "a nested tensor|not called"),
        "conjugate": (torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugate"),
        "negative": (torch.ones(2, dtype=torch.complex64).conj().imag, "lazy conjugate or negative"),
        "subclass": (torch.ones(2).as_subclass(Tagged), "a tensor of the class .*Tagged"),
        "complex of halves": (torch.zeros(2, dtype=torch.complex32), "dtype complex32 cannot be read"),
        "bits": (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "dtype bits8 cannot be read"),
        "module": (torch.nn.Linear(2, 2), r"a whole module \(it asks for torch.nn.modules.linear.Linear"),
        "array": (np.zeros(2), "multiarray._reconstruct to be called"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", _kinds())
def test_kinds_without_plain_bytes_are_refused_by_name(tmp_path, case, form):
    value, message = _kinds()[case]
    path = save({"odd": value, "w": torch.ones(1)}, tmp_path / "a.pth", form)
    with pytest.raises(InputError, match=message) as error:
        open_source(path)
    assert str(path) in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_quantized_tensors_are_refused_by_name(tmp_path, form):
    value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(InputError, match=r"a quantized tensor \(call dequantize"):
        open_source(save({"q": value}, tmp_path / "a.pth", form))


def test_scripts_are_refused_by_name(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"is a TorchScript archive.*torch\.jit\.load"):
        open_source(tmp_path / "a.pt")


def test_strided_packed_floats_are_refused(tmp_path):
    raw = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(InputError, match="strided view of packed 4-bit floats"):
        open_source(save({"w": raw[::2]}, tmp_path / "a.pth"))


# Archives


def members(path: Path) -> list[tuple[zipfile.ZipInfo, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(info, archive.read(info)) for info in archive.infolist()]


def rewrite(path: Path, change) -> Path:
    """Writes the archive again with `change(name, bytes) -> list of (name, bytes, compression)`."""
    old = members(path)
    with zipfile.ZipFile(path, "w") as archive:
        for info, raw in old:
            for name, content, method in change(info.filename, raw):
                archive.writestr(zipfile.ZipInfo(name), content, method)
    return path


@pytest.fixture
def archive(tmp_path) -> Path:
    return save({"w": torch.arange(600.0), "b": torch.arange(7)}, tmp_path / "a.pth")


def keep(name, raw):
    return [(name, raw, zipfile.ZIP_STORED)]


def test_an_archive_written_again_is_read(archive):
    assert_equal(rewrite(archive, keep), {"w": torch.arange(600.0), "b": torch.arange(7)}, "mmap")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, r: [(n, r, zipfile.ZIP_DEFLATED)], r"data/0: is compressed \(method 8"),
        (lambda n, r: keep(n, r) * (2 if n.endswith("data/1") else 1), "data/1: is in the archive twice"),
        (lambda n, r: [] if n.endswith("data/1") else keep(n, r), "tensor 'b': storage 1 is not in the archive"),
        (
            lambda n, r: keep(n, r[:-8] if n.endswith("data/1") else r),
            "storage 1 is 48 bytes, 7 x LongStorage needs 56",
        ),
        (lambda n, r: keep(n, r + b"x" if n.endswith("data/0") else r), "storage 0 is 2401 bytes, 600 x FloatStorage"),
        (lambda n, r: [] if n.endswith("data.pkl") else keep(n, r), "with 0 data.pkl members"),
        (lambda n, r: keep(n, r) + (keep("b/data.pkl", r) if n.endswith(".pkl") else []), "with 2 data.pkl members"),
        (lambda n, r: keep(n, b"big" if n.endswith("byteorder") else r), "is big-endian"),
        (lambda n, r: keep(n, r) + (keep("a/constants.pkl", r) if n.endswith(".pkl") else []), "TorchScript"),
    ],
    ids=["deflated", "twice", "missing", "short", "long", "no-pickle", "two-pickles", "big-endian", "script"],
)
def test_bad_archives_are_refused_by_name(archive, change, message):
    with pytest.raises(InputError, match=message) as error:
        open_source(rewrite(archive, change))
    assert str(archive) in str(error.value)


def test_big_endian_files_of_torch_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    save({"w": torch.ones(2)}, tmp_path / "a.pth")
    save({"w": torch.ones(2)}, tmp_path / "b.pth", "legacy")
    monkeypatch.undo()
    for name in ("a.pth", "b.pth"):
        with pytest.raises(InputError, match="is big-endian"):
            open_source(tmp_path / name)


def directory_entry(raw: bytes, name: bytes) -> int:
    return raw.rindex(name) - 46


def test_members_that_overlap_or_reach_out_are_refused(archive):
    raw = archive.read_bytes()
    first, second = directory_entry(raw, b"a/data/0"), directory_entry(raw, b"a/data/1")
    start = int.from_bytes(raw[first + 42 : first + 46], "little")

    def patched(at: int, *fields: int) -> str:
        changed = bytearray(raw)
        for offset, value in zip(range(at, at + 4 * len(fields), 4), fields, strict=True):
            changed[offset : offset + 4] = value.to_bytes(4, "little")
        archive.write_bytes(changed)
        with pytest.raises(InputError) as error:
            open_source(archive)
        return str(error.value)

    assert "a/data/1: has another name in front of its bytes" in patched(second + 42, start)
    assert "no member begins at byte 77" in patched(second + 42, 77)
    assert "after the members end" in patched(second + 42, len(raw) - 5)
    assert "reach past the members' end" in patched(second + 20, 10**6, 10**6)
    assert "a/data/1: begins at byte" in patched(first + 20, 2500, 2500)
    assert "is encrypted" in patched(first + 8, 1)


def test_crc_is_verified_on_request(archive):
    raw = bytearray(archive.read_bytes())
    at = raw.index(torch.arange(600.0).numpy().tobytes())
    raw[at + 100] ^= 1
    archive.write_bytes(raw)
    open_source(archive).close()
    with pytest.raises(InputError, match=r"member a/data/0: CRC-32 is [0-9a-f]{8}, the archive states"):
        open_source(archive, verify_crc=True)
    raw[at + 100] ^= 1
    archive.write_bytes(raw)
    open_source(archive, verify_crc=True).close()


def test_the_pickles_own_crc_is_always_verified(archive):
    raw = bytearray(archive.read_bytes())
    raw[raw.index(b"FloatStorage") + 1] ^= 1
    archive.write_bytes(raw)
    with pytest.raises(InputError, match=r"member a/data\.pkl: CRC-32"):
        open_source(archive)


def test_archives_saved_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.arange(600.0)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_equal(path, {"w": torch.arange(600.0)}, "mmap")
    with pytest.raises(InputError, match="was saved without checksums"):
        open_source(path, verify_crc=True)


def test_archives_beyond_4_gib(tmp_path):
    """A sparse file of 5 GiB: 64-bit sizes and offsets in the directory."""
    path, big = tmp_path / "big.pth", 5 << 30
    torch.save({"first": torch.zeros(3), "last": torch.zeros(4)}, path)
    parts = {info.filename: raw for info, raw in members(path)}
    pickled = parts["big/data.pkl"].replace(b"K\x03tq", b"\x8a\x05" + (big // 4).to_bytes(5, "little") + b"tq", 1)
    entries, offsets = [], {}
    with path.open("wb") as out:
        last = struct.pack("<4f", 1, 2, 3, 4)
        contents = {"big/data.pkl": pickled, "big/version": b"3\n", "big/data/0": None, "big/data/1": last}
        for name, raw in contents.items():
            offsets[name] = out.tell()
            size, crc = (big, 0) if raw is None else (len(raw), zlib.crc32(raw))
            extra = struct.pack("<2H2Q", 1, 16, size, size)
            sizes = (0xFFFFFFFF, 0xFFFFFFFF)
            out.write(struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, crc, *sizes, len(name), len(extra)))
            out.write(name.encode() + extra)
            out.seek(size, 1) if raw is None else out.write(raw)
            wide = struct.pack("<2H3Q", 1, 24, size, size, offsets[name])
            entry = struct.pack(
                "<4s6H3L5H2L",
                b"PK\x01\x02",
                45,
                45,
                0,
                0,
                0,
                0,
                crc,
                *sizes,
                len(name),
                len(wide),
                0,
                0,
                0,
                0,
                0xFFFFFFFF,
            )
            entries.append(entry + name.encode() + wide)
        start, directory = out.tell(), b"".join(entries)
        out.write(directory)
        out.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 4, 4, len(directory), start))
        out.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(directory), 1))
        out.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    with open_source(path) as source:
        assert source.read("last").tolist() == [1, 2, 3, 4]
        assert source.read("first").tolist() == [0, 0, 0]
    assert torch.load(path, weights_only=True, mmap=True)["last"].tolist() == [1, 2, 3, 4]


# The older form


def test_older_files_cut_lengthened_or_miscounted(tmp_path):
    path = save({"w": torch.arange(6.0)}, tmp_path / "a.pth", "legacy")
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(InputError, match=f"size={len(raw) - 1}: storage .* needs 24 bytes from byte {len(raw) - 24}"):
        open_source(path)
    path.write_bytes(raw + b"xyz")
    with pytest.raises(InputError, match=f"size={len(raw) + 3}, expected {len(raw)}: the rest belongs to no storage"):
        open_source(path)
    path.write_bytes(raw[:-32] + (7).to_bytes(8, "little") + raw[-24:])
    with pytest.raises(InputError, match="holds 7 elements, its tensors expect 6"):
        open_source(path)
    with pytest.raises(InputError, match="holds no checksums"):
        path.write_bytes(raw)
        open_source(path, verify_crc=True)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"w": 1}], "is a pickle, but not one that torch.save wrote"),
        ([0x1950A86A20F9469CFC6C, 1002], "the protocol is not 1001"),
        ([0x1950A86A20F9469CFC6C, 1001, {"little_endian": False}], "is big-endian"),
        ([0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, "x"], "list of storages is not a list of strings"),
        ([0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, [1]], "list of storages is not a list of strings"),
        ([0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, []], "holds no tensors"),
        ([0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}], "ends 1 bytes early"),
    ],
)
def test_other_pickles_are_refused(tmp_path, parts, message):
    path = tmp_path / "a.pth"
    path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    with pytest.raises(InputError, match=message):
        open_source(path)


# Geometry that does not fit the storage


def described(path: Path, size, stride, offset=0, count=6, storage=b"FloatStorage", raw=bytes(24)) -> Path:
    def number(value):
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    place = b"(" + text(b"storage") + b"ctorch\n" + storage + b"\n" + text(b"0") + text(b"cpu") + number(count) + b"tQ"
    rebuilt = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + number(offset) + numbers(size) + numbers(stride) + b"\x89NtR"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}" + text(b"w") + rebuilt + b"s.")
        archive.writestr("a/data/0", raw)
    return path


def test_a_described_tensor_is_read(tmp_path):
    with open_source(described(tmp_path / "a", (2, 3), (3, 1), raw=struct.pack("<6f", *range(6)))) as source:
        assert source.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"size": (7,), "stride": (1,)}, "reaches byte 28, storage 0 has 24"),
        ({"size": (2, 3), "stride": (4, 1)}, "reaches byte 28, storage 0 has 24"),
        ({"size": (6,), "stride": (1,), "offset": 1}, "reaches byte 28"),
        ({"size": (0,), "stride": (1,), "offset": 7}, "reaches byte 28"),
        ({"size": (2,), "stride": (2**62,)}, "reaches byte"),
        ({"size": (2**40, 2**40), "stride": (0, 0)}, "overflows 63 bits"),
        ({"size": (0, 2**40, 2**40), "stride": (0, 0, 0)}, "overflows 63 bits"),
        ({"size": (2**40,), "stride": (0,)}, "bytes made of a storage of 24: save a copy"),
        ({"size": (6,), "stride": (1,), "count": 5}, "storage 0 is 24 bytes, 5 x FloatStorage needs 20"),
        ({"size": (6,), "stride": (1,), "storage": b"QInt8Storage"}, "is quantized"),
        ({"size": (6,), "stride": (1,), "storage": b"StringStorage"}, "StringStorage is not a type of storage"),
    ],
)
def test_geometry_that_does_not_fit_is_refused(tmp_path, geometry, message):
    with pytest.raises(InputError, match=message) as error:
        open_source(described(tmp_path / "a", **geometry))
    assert "tensor 'w'" in str(error.value)


# Fuzz


def opens_or_is_refused(path: Path) -> bool:
    try:
        file = open_weight_file(path)
    except InputError as error:
        assert str(path) in str(error)
        return False
    for stored in file.tensors.values():
        read_stored(file.data, stored)
    file.data.close()
    return True


@pytest.fixture(scope="module", params=FORMS)
def sound(request, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "a.pth"
    base = torch.arange(24.0).reshape(2, 3, 4)
    return save(
        {"model": {"a": base, "t": base.mT, "h": base.half(), "p": torch.nn.Parameter(base)}}, path, request.param
    ).read_bytes()


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_changed_bytes(sound, tmp_path, changes):
    raw = bytearray(sound)
    for at, value in changes:
        raw[at % len(raw)] = value
    (tmp_path / "fuzz").write_bytes(raw)
    opens_or_is_refused(tmp_path / "fuzz")


def test_fuzz_records_of_the_directory(tmp_path):
    """The directory and the end records, byte by byte, to the values that matter most."""
    raw = save({"w": torch.arange(6.0)}, tmp_path / "a.pth").read_bytes()
    start = raw.index(b"PK\x01\x02")
    generator = random.Random(0)
    for at in range(start, len(raw)):
        for value in (0xFF, raw[at] ^ 1 << generator.randrange(8)):
            (tmp_path / "fuzz").write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
            opens_or_is_refused(tmp_path / "fuzz")


def test_fuzz_cuts_are_refused(sound, tmp_path):
    for size in range(0, len(sound), 3):
        (tmp_path / "fuzz").write_bytes(sound[:size])
        assert not opens_or_is_refused(tmp_path / "fuzz")
    (tmp_path / "fuzz").write_bytes(sound)
    assert opens_or_is_refused(tmp_path / "fuzz")


# Memory


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_reading_by_rows_keeps_memory_bounded(tmp_path, strategy, form):
    base = torch.arange(64 << 20, dtype=torch.int32).reshape(8192, 8192)
    path = save({"w": base, "t": base.t()}, tmp_path / "a.pth", form)
    file = open_torch_file(path, strategy)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = peak = resident()
    for key, expected in (("w", base), ("t", base.t())):
        for start in range(0, 8192, 512):
            rows = slice(start, start + 512)
            array = read_stored(file.data, file.tensors[key], rows)
            peak = max(peak, resident())
            assert array[-1, -1] == expected[start + 511, -1] and array[0, 1] == expected[start, 1]
            del array
            release_stored(file.data, file.tensors[key], rows)
    assert peak - before < 64 << 20
