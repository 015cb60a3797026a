"""The safetensors reader: bit-equal with the format's own library, and only `InputError` out of a bad file."""

import json
import os
import struct
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardzoo.convert import file_bytes
from shardzoo.convert import safetensors as reader
from shardzoo.convert.file_bytes import FileBytes, read_stored, release_stored
from shardzoo.convert.safetensors import DTYPES, open_safetensors
from shardzoo.errors import InputError

STRATEGIES = ("mmap", "pread")
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits of the type (only 0 and 1 for booleans)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def packed_bits(array: np.ndarray) -> bytes:
    """An array of 4-bit floats as two to a byte, the first in the low half."""
    halves = array.reshape(-1).view(np.uint8)
    return (halves[0::2] | halves[1::2] << 4).tobytes()


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="U8", shape=(1,), offsets=(0, 1)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_of_the_format_is_known():
    assert set(TORCH_DTYPES) == set(DTYPES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bits_equal_the_librarys_for_every_dtype(tmp_path, strategy):
    tensors = {name: random_tensor(dtype, 5, 6) for name, dtype in TORCH_DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "odd": torch.zeros(3, dtype=torch.uint8)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    expected = load_file(path)
    file = open_safetensors(path, strategy)
    assert set(file.tensors) == set(expected)
    for name, stored in file.tensors.items():
        array = read_stored(file.data, stored)
        assert array.flags.c_contiguous and array.flags.aligned
        shape = tuple(expected[name].shape)
        assert array.shape == (shape if name != "F4" else (5, 12))
        assert (packed_bits(array) if name == "F4" else array.tobytes()) == bits(expected[name])
    file.data.close()


def test_dtypes_map_to_their_numpy_types(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({name: random_tensor(TORCH_DTYPES[name], 2, 2) for name in ("BF16", "F8_E8M0", "F4")}, path)
    file = open_safetensors(path)
    assert file.tensors["BF16"].dtype == ml_dtypes.bfloat16
    assert file.tensors["F8_E8M0"].dtype == ml_dtypes.float8_e8m0fnu
    assert file.tensors["F4"].dtype == ml_dtypes.float4_e2m1fn and file.tensors["F4"].nbytes == 4


def test_values_of_packed_floats(tmp_path):
    pairs = torch.tensor([[0x21, 0x43], [0xF5, 0x78]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"w": pairs}, tmp_path / "a.safetensors")
    file = open_safetensors(tmp_path / "a.safetensors")
    whole = read_stored(file.data, file.tensors["w"]).astype(np.float32)
    np.testing.assert_array_equal(whole, [[0.5, 1, 1.5, 2], [3, -6, -0.0, 6]])
    np.testing.assert_array_equal(read_stored(file.data, file.tensors["w"], slice(1, 2)).astype(np.float32), whole[1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "F4"])
def test_rows_equal_a_slice_of_the_whole(tmp_path, strategy, dtype):
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "w": random_tensor(TORCH_DTYPES[dtype], 7, 3)}, tmp_path / "a")
    file = open_safetensors(tmp_path / "a", strategy)
    stored = file.tensors["w"]
    whole = read_stored(file.data, stored).view(np.uint8)
    for rows in (slice(0, 7), slice(2, 5), slice(6, 7), slice(3, 3), slice(5, 2), slice(-2, None), slice(4, 99)):
        part = read_stored(file.data, stored, rows)
        assert part.view(np.uint8).tobytes() == whole[rows.indices(7)[0] : max(rows.indices(7)[:2])].tobytes()
        release_stored(file.data, stored, rows)
    with pytest.raises(InputError, match="steps of 2"):
        read_stored(file.data, stored, slice(0, 7, 2))


def test_rows_of_a_scalar_are_refused(tmp_path):
    save_file({"s": torch.tensor(1.0)}, tmp_path / "a")
    file = open_safetensors(tmp_path / "a")
    with pytest.raises(InputError, match="no dimensions"):
        read_stored(file.data, file.tensors["s"], slice(0, 1))


# Bad headers: what the format's own library refuses, and more

BAD = {
    "cut in the length": (b"\x01\x02", "size=2 is below the 8 bytes"),
    "length past the end": (struct.pack("<Q", 1000) + b"{}", "length=1000 reaches past the end .file size=10"),
    "length over the limit": (struct.pack("<Q", 100_000_001) + b"{}" * 50, "length=100000001 exceeds 100000000"),
    "length of all ones": (b"\xff" * 8 + b"{}", "exceeds"),
    "not an object": ([1, 2], "does not begin with"),
    "not JSON": (b'{"a":', "not valid JSON"),
    "trailing bytes": (b"{}\x00", "not valid JSON"),
    "NaN": (b'{"a":NaN}', "NaN is not JSON"),
    "not UTF-8": (b'{"\xff":1}', "is not UTF-8"),
    "UTF-16": ("{}".encode("utf-16-le"), "not valid JSON"),
    "nested deep": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
    "huge number": (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
    "two of a key": (b'{"a":1,"b":2,"a":3}', "'a' twice"),
    "two of a field": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', "'dtype' twice"),
    "entry no object": ({"a": 3}, "is a int"),
    "field missing": ({"a": {"dtype": "U8", "shape": []}}, "has the fields"),
    "field unknown": ({"a": {**entry(), "strides": [1]}}, "strides"),
    "unknown dtype": ({"a": entry("F6_E2M3", [4], [0, 3])}, "dtype='F6_E2M3' is unknown"),
    "dtype no string": ({"a": entry(dtype=None)}, "dtype=None is unknown"),
    "negative size": ({"a": entry(shape=[-1])}, "shape=.-1. is not a list"),
    "fractional size": ({"a": entry(shape=[1.0])}, "shape=.1.0. is not a list"),
    "boolean size": ({"a": entry(shape=[True])}, "is not a list"),
    "65 dimensions": ({"a": entry(shape=[1] * 65)}, "at most 64"),
    "shape no list": ({"a": {**entry(), "shape": "x"}}, "shape='x' is not a list"),
    "size overflows": ({"a": entry(shape=[2**32, 2**32])}, "overflows 63 bits"),
    "size overflows beside zero": ({"a": entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}, "overflows 63 bits"),
    "bytes overflow": ({"a": entry("F64", [2**61])}, "overflows 63 bits"),
    "size beyond 64 bits": ({"a": entry(shape=[2**64])}, "is not a list"),
    "one offset": ({"a": entry(offsets=[0])}, "not a pair"),
    "negative offset": ({"a": entry(offsets=[-1, 0])}, "not a pair"),
    "offsets swapped": ({"a": entry(shape=[0], offsets=[1, 0])}, "end before they begin"),
    "offsets unlike shape": ({"a": entry("F32", [2], [0, 4])}, "span 4 bytes, shape=.2. x F32 needs 8"),
    "half a byte": ({"a": entry("F4", [3], [0, 2])}, "fill no whole number of bytes"),
    "gap at the start": ({"a": entry(offsets=[1, 2])}, "a gap of 1 bytes"),
    "gap": ({"a": entry(), "b": entry(offsets=[2, 3])}, "a gap of 1 bytes"),
    "overlap": ({"a": entry(shape=[2], offsets=[0, 2]), "b": entry(offsets=[1, 2])}, "an overlap of 1 bytes"),
    "twice the same bytes": ({"a": entry(), "b": entry()}, "an overlap of 1 bytes"),
    "cut short": ({"a": entry(shape=[9], offsets=[0, 9])}, "6 bytes are missing and 1 of 1 tensors are cut off, 'a'"),
    "bytes left over": ({"a": entry()}, "2 bytes belong to no tensor"),
    "metadata no object": ({"__metadata__": [], "a": entry()}, "__metadata__ is a list"),
    "metadata of numbers": ({"__metadata__": {"n": 1}, "a": entry()}, "the value of 'n' is no string"),
    "half a surrogate pair": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "cannot be printed"),
    "control characters": (
        {"a\x1b[2J": entry(shape=[3], offsets=[0, 3])},
        r"name 'a.x1b.2J' holds characters that cannot be printed",
    ),
    "long name": ({"n" * 2000: entry(shape=[3], offsets=[0, 3])}, "is 2000 characters long, more than 1024"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name(tmp_path, case):
    header, message = BAD[case]
    path = tmp_path / "bad.safetensors"
    if case.startswith(("cut in", "length")):
        path.write_bytes(header)
    else:
        write(path, header, b"xyz")
    with pytest.raises(InputError, match=message) as error:
        open_safetensors(path)
    assert str(path) in str(error.value)


def test_bad_files_are_bad_to_the_library_too(tmp_path):
    """Each case above is refused by the library as well, but for names, and 6-bit floats, which no array type holds."""
    accepted = set()
    for case, (header, _) in BAD.items():
        path = tmp_path / "bad.safetensors"
        path.write_bytes(header) if case.startswith(("cut in", "length")) else write(path, header, b"xyz")
        try:
            with safetensors.safe_open(path, "np"):
                accepted.add(case)
        except (safetensors.SafetensorError, OSError):
            pass
    assert accepted == {"unknown dtype", "control characters", "long name"}


def test_all_problems_are_told_at_once(tmp_path):
    path = write(tmp_path / "a", {"x": entry("NO"), "y": entry(shape=[-3]), "z": entry()}, b"x")
    with pytest.raises(InputError, match=r"(?s)'x'.*'y'"):
        open_safetensors(path)


def test_many_problems_are_counted(tmp_path):
    path = write(tmp_path / "a", {f"t{n}": entry("NO") for n in range(500)})
    with pytest.raises(InputError, match="and 460 more problems") as error:
        open_safetensors(path)
    assert len(str(error.value)) < 20_000


def test_a_header_of_too_many_values_is_refused_unparsed(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HEADER_VALUES", 100)
    with pytest.raises(InputError, match="more than the 100 that are read"):
        open_safetensors(write(tmp_path / "a", {"a": list(range(200))}))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="cannot be opened"):
        open_safetensors(tmp_path / "none")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "a.safetensors"
    tensors = {f"block.{n}.weight": random_tensor(torch.bfloat16, 3, n + 1) for n in range(4)}
    save_file(tensors | {"s": torch.tensor(1.0)}, path, metadata={"format": "pt", "note": "é"})
    return path.read_bytes()


def opens_or_is_refused(path: Path, raw: bytes) -> bool:
    """Whether the reader opens these bytes and reads every tensor; anything but `InputError` fails the test."""
    path.write_bytes(raw)
    try:
        file = open_safetensors(path)
    except InputError as error:
        assert str(path) in str(error)
        return False
    for stored in file.tensors.values():
        assert read_stored(file.data, stored).nbytes <= 2 * len(raw)
    file.data.close()
    return True


FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_changed_bytes(sound, tmp_path, flips):
    raw = bytearray(sound)
    for at, value in flips:
        raw[at % len(raw)] = value
    opens_or_is_refused(tmp_path / "fuzz", bytes(raw))


def test_fuzz_every_length_is_refused_but_the_whole(sound, tmp_path):
    opened = [size for size in range(len(sound)) if opens_or_is_refused(tmp_path / "fuzz", sound[:size])]
    assert opened == []
    assert not opens_or_is_refused(tmp_path / "fuzz", sound + b"\0")
    assert opens_or_is_refused(tmp_path / "fuzz", sound)


@FUZZ
@given(
    header=st.dictionaries(
        st.text(max_size=5) | st.just("__metadata__"),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*DTYPES, "X", 3]),
                "shape": st.lists(st.integers(-1, 2**40) | st.integers(0, 3) | st.floats(), max_size=4),
                "data_offsets": st.lists(st.integers(-1, 30) | st.integers(0, 2**70), max_size=3),
            }
        )
        | st.recursive(
            st.none() | st.booleans() | st.text(max_size=3), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
        ),
        max_size=4,
    ),
    data=st.binary(max_size=30),
)
def test_fuzz_made_headers(tmp_path, header, data):
    opens_or_is_refused(write(tmp_path / "made", header, data), (tmp_path / "made").read_bytes())


# Access


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_read_at_the_same_time(tmp_path, strategy):
    tensors = {f"w{n}": random_tensor(torch.float32, 64, 512, seed=n) for n in range(8)}
    save_file(tensors, tmp_path / "a")
    file = open_safetensors(tmp_path / "a", strategy)
    wrong: list[str] = []

    def read_all():
        for name, tensor in tensors.items():
            for start in range(0, 64, 16):
                rows = slice(start, start + 16)
                if read_stored(file.data, file.tensors[name], rows).tobytes() != bits(tensor[rows]):
                    wrong.append(name)
                release_stored(file.data, file.tensors[name], rows)

    threads = [threading.Thread(target=read_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_view_stays_valid_after_release_and_close(tmp_path):
    tensor = random_tensor(torch.float32, 64, 512)
    save_file({"w": tensor}, tmp_path / "a")
    file = open_safetensors(tmp_path / "a", "mmap")
    array = read_stored(file.data, file.tensors["w"])
    assert not array.flags.writeable
    release_stored(file.data, file.tensors["w"])
    file.data.close()
    assert array.tobytes() == bits(tensor)
    with pytest.raises(InputError, match="is closed"):
        read_stored(file.data, file.tensors["w"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_cut_after_opening_is_an_error_and_no_crash(tmp_path, strategy):
    save_file({"w": random_tensor(torch.float32, 64, 512)}, tmp_path / "a")
    file = open_safetensors(tmp_path / "a", strategy)
    os.truncate(tmp_path / "a", 100)
    with pytest.raises(InputError, match=r"size=100 was .* changed while being read"):
        read_stored(file.data, file.tensors["w"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_written_to_after_opening_is_an_error(tmp_path, strategy):
    save_file({"w": random_tensor(torch.float32, 64, 512)}, tmp_path / "a")
    file = open_safetensors(tmp_path / "a", strategy)
    os.utime(tmp_path / "a", ns=(0, file.data.mtime_ns + 1))
    with pytest.raises(InputError, match="was written to since it was opened"):
        read_stored(file.data, file.tensors["w"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reading_by_rows_keeps_memory_bounded(tmp_path, strategy):
    size = 256 << 20
    path = tmp_path / "big.safetensors"
    header = json.dumps({"w": entry("F32", [65536, 1024], [0, size])}).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + size)
    file = open_safetensors(path, strategy)
    before = peak = resident_bytes()
    for start in range(0, 65536, 1024):
        rows = slice(start, start + 1024)
        assert read_stored(file.data, file.tensors["w"], rows).sum() == 0
        peak = max(peak, resident_bytes())
        release_stored(file.data, file.tensors["w"], rows)
    assert peak - before < 48 << 20


@pytest.mark.parametrize(
    ("kind", "network"),
    [("ext4", False), ("tmpfs", False), ("overlay", False), ("nfs4", True), ("cifs", True), ("fuse.gcsfuse", True)],
)
def test_network_file_systems_are_read_without_a_map(tmp_path, monkeypatch, kind, network):
    monkeypatch.setattr(file_bytes, "file_system_type", lambda path: kind)
    save_file({"w": torch.ones(3)}, tmp_path / "a")
    data = FileBytes(tmp_path / "a")
    assert data.strategy == ("pread" if network else "mmap")
    data.close()


def test_the_file_system_is_that_of_the_longest_mount(tmp_path, monkeypatch):
    mounts = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path / "local"), "xfs"), (str(tmp_path) + "x", "tmpfs")]
    monkeypatch.setattr(file_bytes, "_mounts", lambda: iter(mounts))
    assert file_bytes.file_system_type(tmp_path / "a") == "nfs4"
    assert file_bytes.file_system_type(tmp_path / "local" / "a") == "xfs"
    assert file_bytes.file_system_type(Path("/")) == "ext4"
    monkeypatch.undo()
    assert file_bytes.file_system_type(Path("/proc/self/status")) == "proc"
