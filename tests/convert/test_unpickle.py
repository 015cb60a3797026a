"""The closed interpreter: it rebuilds state dicts, calls nothing, and ends on any input in bounded time and memory."""

import argparse
import collections
import importlib
import io
import os
import pathlib
import pickle
import pickletools
import posix
import struct
import subprocess
import sys
import textwrap
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.convert import unpickle as machine
from shardzoo.convert.file_bytes import FileBytes
from shardzoo.convert.pickle_calls import Global, Opaque, RebuiltTensor, StorageRef
from shardzoo.convert.source import open_source
from shardzoo.convert.torch_file import open_torch_file
from shardzoo.convert.unpickle import unpickle
from shardzoo.errors import InputError


def run(tmp_path: Path, raw: bytes):
    path = tmp_path / "pickle"
    path.write_bytes(raw)
    return read(path)


def read(path: Path):
    data = FileBytes(path)
    try:
        return unpickle(data, 0, data.size, str(path)).value
    finally:
        data.close()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def torch_zip(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, raw in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", raw)
        archive.writestr("archive/version", "3\n")
    return path


def torch_legacy(path: Path, pickled: bytes) -> Path:
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, system)]
    path.write_bytes(b"".join([*parts, pickled, pickle.dumps([], protocol=2)]))
    return path


# What it rebuilds


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_plain_values_equal_pickles(tmp_path, protocol):
    value = {
        "numbers": [0, -1, 255, 65536, 2**31, -(2**62), 2**100, 1.5, True, False, None],
        "text": ["", "a", "é", "x" * 300, "\U0001f600"],
        "nested": {"a": {"b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))}},
        3: "integer key",
        None: "no key",
        "many": list(range(3000)),
    }
    if protocol > 2:
        value["bytes"] = [b"", b"abc", bytes(range(256)) * 3]
    if protocol == 1:  # the oldest binary protocol writes large integers as text, which PyTorch never used
        value["numbers"] = [0, -1, 255, 65536, None]
    assert run(tmp_path, pickle.dumps(value, protocol=protocol)) == value


def test_known_classes_become_plain_values(tmp_path):
    value = {
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"k": [1]}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "scalar": np.float32(1.5),
        "integer": np.int64(-7),
        "set": {1, 2},
        "frozen": frozenset([3]),
        "device": torch.device("cpu"),
        "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("a")),
        "buffer": io.BytesIO(b"abc"),
    }
    for protocol in (2, 4):
        found = run(tmp_path, pickle.dumps(value, protocol=protocol))
        assert found["ordered"] == {"b": 1, "a": 2} and list(found["ordered"]) == ["b", "a"]
        assert found["counter"] == {"a": 2, "b": 1} and found["default"] == {"k": [1]}
        assert found["size"] == (2, 3) and found["dtype"] == Global("torch", "bfloat16")
        assert found["scalar"] == 1.5 and found["integer"] == -7
        assert sorted(found["set"]) == [1, 2] and found["frozen"] == [3]
        assert found["device"] == Opaque("torch.device") and found["args"] == Opaque("argparse.Namespace")
        assert found["buffer"] == Opaque("_io.BytesIO")


def test_strings_of_python_2(tmp_path):
    assert run(tmp_path, b"\x80\x02U\x06weight.") == "weight"
    assert run(tmp_path, b"\x80\x02T\x03\x00\x00\x00\xff\xfe\xfd.") == b"\xff\xfe\xfd"


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x06tQ"


def tensor(storage=STORAGE, tail=b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89)", function=b"_rebuild_tensor_v2"):
    return b"ctorch._utils\n" + function + b"\n(" + storage + tail + b"tR"


def test_a_tensor_becomes_a_description(tmp_path):
    expected = RebuiltTensor(StorageRef("0", "FloatStorage", 6), 0, (2, 3), (3, 1), None)
    assert run(tmp_path, b"\x80\x02" + tensor() + b".") == expected
    v1 = tensor(tail=b"K\x00K\x02K\x03\x86K\x03K\x01\x86", function=b"_rebuild_tensor")
    assert run(tmp_path, v1 + b".") == expected
    v3 = tensor(tail=b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89)ctorch\nuint16\n", function=b"_rebuild_tensor_v3")
    assert run(tmp_path, v3 + b".").dtype == "uint16"


# What it refuses, by name


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


fired: list[object] = []


def fire(*args):
    """Named by pickles of these tests."""
    fired.append(args)


CALLS = {
    "posix.system": (os.system, "touch canary"),
    "builtins.eval": (eval, "open('canary', 'w')"),
    "builtins.exec": (exec, "open('canary', 'w')"),
    "builtins.getattr": (getattr, "text", "join"),
    "builtins.__import__": (__import__, "antigravity"),
    "io.open": (open, "canary", "w"),
    "subprocess.Popen": (subprocess.Popen, ["touch", "canary"]),
    "subprocess.check_output": (subprocess.check_output, ["touch", "canary"]),
    "torch.storage._load_from_bytes": (torch.storage._load_from_bytes, b"x"),
    "torch.serialization.load": (torch.load, "x"),
    "torch.hub.load": (torch.hub.load, "a", "b"),
    "_pickle.loads": (pickle.loads, b"N."),
    "importlib.import_module": (importlib.import_module, "antigravity"),
    "test_unpickle.fire": (fire, 1),
    "types.SimpleNamespace": (type(sys.implementation),),
    "builtins.bytearray": (bytearray, 1 << 40),
    "builtins.range": (range, 1 << 60),
    "functools.partial": (__import__("functools").partial, os.system, "touch canary"),
}


WATCHED = (
    "import",
    "compile",
    "exec",
    "os.",
    "subprocess.",
    "pickle.",
    "ctypes.",
    "socket.",
    "shutil.",
    "code.",
    "open",
)
_heard: list[str] | None = None


def _hook(event: str, args: tuple) -> None:
    if _heard is not None and event.startswith(WATCHED):
        opened_to_read = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not opened_to_read:
            _heard.append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def nothing_runs(folder: Path):
    """Fails if the interpreter reports an import, a compilation, a process, a file written, or a call of `fire`."""
    global _heard
    here = os.getcwd()
    os.chdir(folder)
    modules, _heard = set(sys.modules), []
    try:
        yield
    finally:
        heard, _heard = _heard, None
        os.chdir(here)
    assert heard == [] and fired == []
    assert set(sys.modules) == modules
    assert not (folder / "canary").exists()


def test_the_watch_hears_what_pickle_would_do(tmp_path):
    """The watch is worth something only if plain unpickling sets it off."""
    for call in (Call(os.system, "true"), Call(eval, "1"), Call(open, "canary", "w"), Call(subprocess.call, ["true"])):
        with pytest.raises(AssertionError), nothing_runs(tmp_path):
            pickle.loads(pickle.dumps(call))
    with pytest.raises(AssertionError), nothing_runs(tmp_path):
        pickle.loads(pickle.dumps(Call(fire, 1)))
    fired.clear()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_call_is_refused_by_name_and_not_made(tmp_path, name, form):
    call = Call(*CALLS[name])
    make = torch_zip if form == "zip" else torch_legacy
    for protocol in (2, 4):
        for value in (call, {"weight": call}, [call]):
            path = make(tmp_path / "bad.pth", pickle.dumps(value, protocol=protocol, fix_imports=False))
            with nothing_runs(tmp_path), pytest.raises(InputError) as error:
                open_source(path)
            assert name in str(error.value) and str(path) in str(error.value)
            assert "was not called" in str(error.value) and "torch.save(model.state_dict()" in str(error.value)


def test_files_that_torch_saved_with_a_call_inside(tmp_path):
    for legacy in (False, True):
        path = tmp_path / "bad.pth"
        state = {"weight": torch.ones(2), "hook": Call(posix.system, "touch canary")}
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
        with nothing_runs(tmp_path), pytest.raises(InputError, match=r"posix\.system"):
            open_source(path)


FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
REFUSED = {
    "no opcodes": (b"", "ends 1 bytes early"),
    "no stop": (b"\x80\x02N", "ends 1 bytes early"),
    "empty stack at stop": (b"\x80\x02.", "empty stack"),
    "call of a number": (b"K\x01)R.", "a int is called"),
    "call without arguments": (b"cos\nsystem\nNR.", "os.system is called with a NoneType"),
    "class made new": (b"csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
    "instance opcode": (b"(ios\nsystem\n.", "opcode 0x69"),
    "object opcode": (b"(cos\nsystem\no.", "opcode 0x6f"),
    "extension opcode": (b"\x82\x01.", "opcode 0x82"),
    "new object with keywords": (b"cos\nsystem\n)}\x92.", "opcode 0x92"),
    "persistent text": (b"Pstorage\n.", "opcode 0x50"),
    "duplicate opcode": (b"N2.", "opcode 0x32"),
    "name by numbers": (b"K\x01K\x02\x93.", "no short strings"),
    "long name": (b"c" + b"a" * 2000 + b"\nb\n.", "name of more than 1024 bytes"),
    "state of a name": (b"cos\nsystem\n}b.", "state is set on a os.system"),
    "state of a list": (b"]}b.", "state is set on a list"),
    "append to a tuple": (b")Na.", "adds to a list and finds tuple"),
    "item of a list": (b"]NNs.", "adds to a dict and finds list"),
    "odd items": (b"}(Nu.", "key without a value"),
    "mark never set": (b"Nt.", "mark that was never set"),
    "tuple of too little": (b"N\x87.", "empty stack"),
    "memo never put": (b"h\x05.", "recalls value 5"),
    "put of nothing": (b"q\x00.", "empty stack"),
    "list as key": (b"}]Ns.", "a list is used as a dict key"),
    "tuple as key": (b"}K\x01\x85Ns.", "a tuple is used as a dict key"),
    "huge key": (b"}\x8a\x10" + b"\x7f" * 16 + b"Ns.", "a int is used as a dict key"),
    "huge integer": (b"\x8b\xff\xff\xff\x00" + b"\x01" * 50 + b".", "a value of 16777215 bytes, more than the 64"),
    "huge string": (b"X\xff\xff\xff\xff.", "a value of 4294967295 bytes"),
    "huge string of 64 bits": (b"\x8d" + b"\xff" * 8 + b".", "more than the 16777216"),
    "string cut short": (b"X\x10\x00\x00\x00abc", "ends 13 bytes early"),
    "string not UTF-8": (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
    "name not UTF-8": (b"c\xff\nx\n.", "not UTF-8"),
    "persistent number": (b"K\x01Q.", "persistent id of unknown form"),
    "persistent module": (b"(" + text("module") + b"cmine\nNet\nNNtQ.", "whole module .it asks for mine.Net"),
    "storage of another class": (b"(" + text("storage") + b"cos\nFloatStorage\n" + text("0") + text("cpu")
                                 + b"K\x01tQ.",
                                 "class os.FloatStorage"),
    "storage of no count": (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"NtQ.",
                            "no sound number"),
    "storage of negative count": (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
                                  + b"J\xff\xff\xff\xfftQ.", "no sound number"),
    "storage on meta": (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("meta") + b"K\x01tQ.",
                        "meta tensor"),
    "view of a storage": (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
                          + b"K\x01" + text("1") + b"K\x00K\x01\x87tQ.", "is a view of another"),
    "tensor over a list": (tensor(storage=b"]") + b".", "over a list, not a storage"),
    "tensor of negative size": (tensor(tail=b"K\x00J\xff\xff\xff\xff\x85K\x01\x85\x89)") + b".", "size is not made"),
    "tensor of boolean size": (tensor(tail=b"K\x00\x88\x85K\x01\x85\x89)") + b".", "size is not made"),
    "tensor of fractional stride": (tensor(tail=b"K\x00K\x01\x85G" + b"\0" * 8 + b"\x85\x89)") + b".", "stride is not"),
    "tensor of a list as size": (tensor(tail=b"K\x00]K\x01\x85\x89)") + b".", "size is a list"),
    "tensor of uneven geometry": (tensor(tail=b"K\x00K\x01\x85)\x89)") + b".", "1 sizes and 0 strides"),
    "tensor of negative offset": (tensor(tail=b"J\xff\xff\xff\xff))\x89)") + b".", "offset is not made"),
    "tensor with few arguments": (tensor(tail=b"K\x00") + b".", "_rebuild_tensor_v2 is called with 2 arguments"),
    "tensor of unknown dtype": (tensor(tail=b"K\x00))\x89)cos\nsystem\n", function=b"_rebuild_tensor_v3") + b".",
                                "not a torch dtype"),
    "lazy conjugate": (tensor(tail=b"K\x00))\x89)}" + text("conj") + b"\x88s") + b".", "lazy conjugate"),
    "parameter of a list": (b"ctorch._utils\n_rebuild_parameter\n]\x89)\x87R.", "_rebuild_parameter is called"),
    "wrapped class": (FROM_TYPE + b"(ctorch._utils\n_rebuild_tensor_v2\ncmine\nTensor\n)}tR.", "class mine.Tensor"),
    "wrapped function": (FROM_TYPE + b"(cos\nsystem\nctorch\nTensor\n)}tR.", "rebuilds no tensor"),
    "size of a string": (b"ctorch\nSize\n" + text("ab") + b"\x85R.", "tuple is called with 1 arguments"),
    "encode to a codec": (b"c_codecs\nencode\n" + text("a") + text("zip") + b"\x86R.", "_codecs.encode is called"),
    "encode beyond Latin-1": (b"c_codecs\nencode\n" + text("\u0394") + text("latin1") + b"\x86R.", "not Latin-1"),
    "numpy objects": (b"cnumpy\ndtype\n" + text("O8") + b"\x85R.", "numpy.dtype..O8.. is asked for"),
    "numpy array": (pickle.dumps(np.zeros(2), protocol=2), "_reconstruct"),
    "big-endian numpy": (pickle.dumps(np.dtype(">f4"), protocol=2), "not little-endian"),
    "numpy scalar of few bytes": (b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n" + text("f8")
                                  + b"\x85RC\x01a\x86R.", "numpy scalar is called"),
    "pairs that are none": (b"ccollections\nOrderedDict\n]Na\x85R.", "OrderedDict is called with 1 arguments"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    raw, message = REFUSED[case]
    path = tmp_path / "pickle"
    path.write_bytes(raw)
    with nothing_runs(tmp_path), pytest.raises(InputError, match=message):
        read(path)


# Bombs: every one ends quickly within a small address space

LAUGHS = b"(" + text("l") * 10 + b"lq\x00" + b"".join(
    b"(" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"lq" + bytes([n + 1]) for n in range(60)
) + b"."  # fmt: skip
TUPLES = b")q\x000" + b"".join(
    b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) + b"0" for n in range(60)
) + b"h\x3c"  # fmt: skip
ORDERED, LISTED, ENCODE = (
    b"ccollections\nOrderedDict\nq\x010",
    b"c__builtin__\nlist\nq\x010",
    b"c_codecs\nencode\nq\x010",
)


def bombs(scale: int) -> dict[str, bytes]:
    """Pickles that ask for too much, against limits divided by `scale`."""
    many = 6_000_000 // scale
    numbered = b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(60_000))
    return {
        "lists of lists": LAUGHS,
        "tuples of tuples as a key": b"}" + TUPLES + b"Ns.",
        "tuples of tuples called": TUPLES + b")R.",
        "tuples of tuples in a call": b"cos\nsystem\n" + TUPLES + b"R.",
        "tuples of tuples as a size": b"ctorch\nSize\n" + TUPLES + b"\x85R.",
        "tuples of tuples as a storage": TUPLES + b"Q.",
        "memo": b"N" + b"".join(b"r" + struct.pack("<I", n) for n in range(many // 2)) + b".",
        "opcodes": b"N0" * (many // 2 + 1) + b".",
        "marks": b"(" * 2000 + b".",
        "deep tuples": b")" + b"\x85" * (many - 100) + b".",
        "deep lists": b"]" * (many // 2 - 100) + b"a" * (many // 2 - 101) + b".",
        "empty dicts": b"(" + b"}" * (many - 100) + b"l.",
        "dicts of one": b"(" + b"}NNs" * (many // 4 - 100) + b"l.",
        "a list in itself": b"]q\x00h\x00a.",
        "a dict in itself": b"}q\x00" + text("model") + b"h\x00s.",
        "copied dicts": ORDERED + b"}q\x00(" + numbered + b"u0(" + b"h\x01h\x00\x85R" * (many // 6) + b"l.",
        "copied lists": LISTED + b"](" + b"N" * (many // 6) + b"eq\x000(" + b"h\x01h\x00\x85R" * (many // 7) + b"l.",
        "copied bytes": ENCODE + text("a" * 10_000_000) + b"q\x000" + text("latin1") + b"q\x020("
        + b"h\x01h\x00h\x02\x86R" * (many // 7) + b"l.",
        "long strings": b"(" + text("\U0001f600" * 1_000_000) * 15 + b"l.",
        "calls": ORDERED + b"(" + b"h\x01)R" * (many // 3 - 100) + b"l.",
    }  # fmt: skip


# The shape of these only tells once the value is walked for tensors
SHARED = b"]q\x00" + tensor() + b"a0" + b"".join(
    b"(h" + bytes([n]) + b"h" + bytes([n]) + b"lq" + bytes([n + 1]) + b"0" for n in range(200)
)  # fmt: skip


def walked_bombs(scale: int) -> dict[str, bytes]:
    many = 6_000_000 // scale
    return {
        "shared levels": SHARED + b"}" + text("model") + b"h\xc8s.",
        "all shared levels": SHARED + b"(" + b"".join(b"h" + bytes([n]) for n in range(201)) + b"l.",
        "wide and in itself": b"](" + b"N" * (many // 4) + b"eq\x00h\x00a" + tensor() + b"a.",
        "long keys": b"}" + (text("k" * 1000) + b"}") * 50 + text("w") + tensor() + b"s" * 51 + b".",
        "wide under a long key": b"}("
        + text("k" * 10_000_000)
        + b"]("
        + b"N" * (many // 4)
        + b"e"
        + text("w")
        + tensor()
        + b"u.",
        "one tensor under many names": b"}" + text("a") + b"](" + tensor() + b"q\x00" + b"h\x00" * (many // 4) + b"es.",
        "wide many times": b"](" + b"N" * (many // 6) + b"eq\x000(" + b"h\x00" * (many // 6) + tensor() + b"l.",
    }


LIMITED = """
    import resource, sys, time
    from shardzoo.convert import state_dict, unpickle
    from shardzoo.convert.source import open_source
    from shardzoo.errors import InputError
    scale = int(sys.argv[1])
    for name in ("MAX_OPCODES", "MAX_MEMO", "MAX_CALL_COST"):
        setattr(unpickle, name, getattr(unpickle, name) // scale)
    state_dict.MAX_NODES //= scale
    state_dict.MAX_TENSORS //= scale
    base = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (base + (1000 << 20),) * 2)
    for path in sys.argv[2:]:
        for select in (None, "/"):
            start = time.process_time()
            try:
                open_source(path, select=select)
            except InputError as error:
                assert len(str(error)) < 3000, len(str(error))
            else:
                raise SystemExit(f"{path} opened")
            print(path, select, round(time.process_time() - start, 1), flush=True)
            assert time.process_time() - start < 60 / scale + 1, path
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("scale", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("made", [bombs, walked_bombs])
def test_bombs_end_in_bounded_time_and_memory(tmp_path, made, scale):
    paths = [torch_zip(tmp_path / name.replace(" ", "-"), raw, {"0": bytes(24)}) for name, raw in made(scale).items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(scale), *map(str, paths)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# Fuzz


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    """The pickle of a state dict as torch writes it, without its archive."""
    path = tmp_path_factory.mktemp("saved") / "a.pth"
    base = torch.arange(24.0).reshape(2, 3, 4)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = {"model": module.state_dict(), "t": base.mT, "u": base.to(torch.uint16), "p": torch.nn.Parameter(base)}
    torch.save({**state, "args": argparse.Namespace(a=1), "step": np.float64(3)}, path)
    with zipfile.ZipFile(path) as archive:
        return archive.read("a/data.pkl")


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ends(tmp_path: Path, raw: bytes) -> None:
    """Whatever names the bytes spell, nothing runs and nothing but `InputError` comes out."""
    path = tmp_path / "pickle"
    path.write_bytes(raw)
    try:
        with nothing_runs(tmp_path):
            read(path)
    except InputError as error:
        assert len(str(error)) < 3000


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5))
def test_fuzz_changed_bytes(saved, tmp_path, changes):
    raw = bytearray(saved)
    for at, value in changes:
        raw[at % len(raw)] = value
    ends(tmp_path, bytes(raw))


def test_fuzz_cuts(saved, tmp_path):
    for size in range(0, len(saved), 5):
        with pytest.raises(InputError):
            run(tmp_path, saved[:size])


OPCODE = st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])
PIECE = (
    OPCODE
    | st.binary(max_size=3)
    | st.sampled_from(
        [
            tensor(),
            STORAGE,
            text("model"),
            b"ccollections\nOrderedDict\n",
            b"cposix\nsystem\n",
            b")R",
            b"(",
            b"q\x00",
            b"h\x00",
        ]
    )
)


@FUZZ
@given(pieces=st.lists(PIECE, max_size=60))
def test_fuzz_made_programs(tmp_path, pieces):
    ends(tmp_path, b"".join(pieces) + b".")


def test_limits_are_those_of_a_large_state_dict(tmp_path):
    """A state dict of 2,000 tensors takes a ninetieth of what is allowed, so the limits bind no real file."""
    path = tmp_path / "many.pth"
    base = torch.zeros(4)
    torch.save({f"blocks.{n}.attention.weight": base[n % 4 :] for n in range(2_000)}, path)
    file = open_torch_file(path)
    assert len(file.tensors) == 2_000
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("many/data.pkl")
    opcodes = list(pickletools.genops(pickled))
    assert len(opcodes) * 90 < machine.MAX_OPCODES
    assert sum("PUT" in opcode.name for opcode, _, _ in opcodes) * 90 < machine.MAX_MEMO
    assert len(pickled) * 90 < machine.MAX_PICKLE_BYTES
