"""The manifest: what a checkpoint holds, where it came from and how it is laid out, with no device or mesh in it.

Stored as the JSON item `manifest` beside the Orbax items `params` and `carried`; its sha256 stands in the checkpoint's
`custom_metadata`, and it lists every other file with its size, so that nothing can be missing or added unseen.
"""

import dataclasses as dc
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardzoo.checkpoints.grid import Grid, LeafSpec
from shardzoo.errors import fail_if
from shardzoo.strict_json import parse_object

FORMAT = "shardzoo"
VERSION = 1
PARAMS, CARRIED, OPT_STATE, MANIFEST = "params", "carried", "opt_state", "manifest"
ASSETS = "manifest/assets"  # inside an item, for Orbax takes every folder at the top for an item
KINDS = ("safetensors", "pt-zip", "pt-legacy")
INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int2", "int4")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "float4_e2m1fn", "float8_e8m0fnu")
FLOATS8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz")
STORED = INTEGERS + FLOATS + FLOATS8

Json = dict[str, Any]


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name in a manifest.

    Raises:
        ValueError: not a dtype that checkpoints store.
    """
    if name not in STORED:
        raise ValueError(f"dtype={name!r} is not stored in checkpoints: use one of {', '.join(STORED)}")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dc.dataclass(frozen=True, kw_only=True)
class Source:
    """One file that the values came from.

    Attributes:
        name: path relative to the source folder.
        kind: safetensors, pt-zip or pt-legacy.
        size: bytes.
        sha256: of the whole file; None where the values have changed since (saved from a running model).
        header: the file's own header as text, so that it can be written again byte for byte (safetensors).
        detail: anything else that export needs.
    """

    name: str
    kind: str
    size: int
    sha256: str | None = None
    header: str | None = None
    detail: Json = dc.field(default_factory=dict)


@dc.dataclass(frozen=True, kw_only=True)
class Skipped:
    """A source tensor that is not stored, and why."""

    key: str
    reason: str


@dc.dataclass(frozen=True, kw_only=True)
class ManifestHeader:
    """What the manifest says apart from leaves and files.

    Attributes:
        family: name in the registry of families.
        config: the model's config as JSON (`config_to_json`).
        component: the part of its source that this model is ("language_model"); "model" where no converter said so.
        sources: files it came from.
        skipped: source tensors left out.
        aliases: source key -> source key of equal values stored once (tied weights).
        detail: anything else about the conversion, JSON.
    """

    family: str
    config: Json
    component: str = "model"
    sources: tuple[Source, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    aliases: Mapping[str, str] = dc.field(default_factory=dict)
    detail: Json = dc.field(default_factory=dict)


@dc.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One stored leaf: its spec and grid, the sum of its values, and the source ranges it was made of.

    Attributes:
        folder: path below the checkpoint.
        checksum: 16 hexadecimal digits, see `sums`.
        provenance: one entry for each block, `{"file": index, "key": ..., "at": [[start, stop]..], "take": ...}`.
    """

    spec: LeafSpec
    grid: Grid
    folder: str
    checksum: str
    provenance: tuple[Json, ...] = ()

    def files(self) -> dict[str, int]:
        """Path below the checkpoint -> exact size, of the data files."""
        item = self.spec.dtype.itemsize
        return {f"{self.folder}/{self.grid.file(i)}": self.grid.file_bytes(i, item) for i in self.grid.indices()}


@dc.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size of a file below the checkpoint; sha256 for all but data files, whose chunks carry crc32c themselves."""

    size: int
    sha256: str | None = None


@dc.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that `manifest/metadata` holds.

    Attributes:
        leaves: parameters by path.
        carried: source tensors that the model does not run, by source key.
        files: every file but the manifest itself and the two markers, by path.
        producer: name and version of what wrote it.
        opt_state: of a training checkpoint, the leaves of the optimizer's state by path.
        training: of a training checkpoint, everything else (`training_state.about`): step, data position, key, mesh.
    """

    header: ManifestHeader
    leaves: Mapping[str, Leaf]
    carried: Mapping[str, Leaf]
    files: Mapping[str, FileEntry]
    producer: str
    opt_state: Mapping[str, Leaf] = dc.field(default_factory=dict)
    training: Json | None = None

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def leaf(self, path: str) -> Leaf:
        """A leaf by parameter path, or by `carried/<source key>` or `opt_state/<path>`."""
        for item, leaves in ((CARRIED, self.carried), (OPT_STATE, self.opt_state)):
            if path.startswith(item + "/"):
                return leaves[path.removeprefix(item + "/")]
        return self.leaves[path]

    def all_leaves(self) -> dict[str, Leaf]:
        aside = {f"{CARRIED}/{key}": leaf for key, leaf in self.carried.items()}
        return {**self.leaves, **aside, **{f"{OPT_STATE}/{p}": leaf for p, leaf in self.opt_state.items()}}

    def to_json(self) -> Json:
        header = dc.asdict(self.header)
        header["config_sha256"] = sha256(canonical(self.header.config))
        trained = {"opt_state": {path: _leaf_json(leaf) for path, leaf in self.opt_state.items()}}
        return {
            **(trained | {"training": self.training} if self.training is not None else {}),
            "format": FORMAT,
            "version": VERSION,
            "producer": self.producer,
            **header,
            "leaves": {path: _leaf_json(leaf) for path, leaf in self.leaves.items()},
            "carried": {key: _leaf_json(leaf) for key, leaf in self.carried.items()},
            "files": {path: {k: v for k, v in dc.asdict(f).items() if v is not None} for path, f in self.files.items()},
        }

    def encode(self) -> bytes:
        """The bytes of `manifest/metadata`: the same for equal manifests."""
        return canonical(self.to_json())


def _leaf_json(leaf: Leaf) -> Json:
    spec = leaf.spec
    return {
        "dims": " ".join(spec.dims),
        "shape": list(spec.shape),
        "dtype": spec.dtype.name,
        "split": {dim: list(axes) for dim, axes in spec.split.items()},
        "outer": list(leaf.grid.outer),
        "inner": list(leaf.grid.inner),
        "folder": leaf.folder,
        "checksum": leaf.checksum,
        "from": list(leaf.provenance),
    }


class _Reader:
    """Takes fields out of decoded JSON by type, noting every problem instead of stopping at the first."""

    def __init__(self):
        self.problems: list[str] = []

    def take(self, where: str, record: Any, fields: Mapping[str, tuple[type, ...]]) -> Json:
        """The named fields of `record`; wrong, missing and unknown ones are noted and come back as None."""
        if not isinstance(record, dict):
            self.problems.append(f"{where}: is {type(record).__name__}, not an object")
            record = {}
        self.problems += [f"{where}: unknown field {name!r}" for name in record if name not in fields]
        out = {}
        for name, kinds in fields.items():
            value = record.get(name)
            good = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not good:
                self.problems.append(f"{where}: field {name!r} is {_short(value)}, not {_names(kinds)}")
            out[name] = value if good else None
        return out

    def check(self, good: bool, problem: str) -> bool:
        if not good:
            self.problems.append(problem)
        return good

    def items(self, where: str, value: Any) -> list[tuple[str, Any]]:
        """The entries of a list, each with a name for messages."""
        return [(f"{where}[{i}]", v) for i, v in enumerate(value or ())]


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)


NONE = type(None)
TOP = {
    "format": (str,), "version": (int,), "producer": (str,), "family": (str,), "config": (dict,),
    "config_sha256": (str,), "component": (str,), "sources": (list,), "skipped": (list,),
    "aliases": (dict,), "detail": (dict,), "leaves": (dict,), "carried": (dict,), "files": (dict,),
    "opt_state": (dict, NONE), "training": (dict, NONE),
}  # fmt: skip
SOURCE = {
    "name": (str,), "kind": (str,), "size": (int,), "sha256": (str, NONE), "header": (str, NONE), "detail": (dict,),
}  # fmt: skip
LEAF = {
    "dims": (str,), "shape": (list,), "dtype": (str,), "split": (dict,), "outer": (list,), "inner": (list,),
    "folder": (str,), "checksum": (str,), "from": (list,),
}  # fmt: skip


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; `where` names its file in messages.

    Raises:
        InputError: not JSON, a newer version, or any field that does not fit the schema; all problems in one message.
    """
    r = _Reader()
    record = parse_object(data, f"{where}: not a manifest")
    if isinstance(record.get("version"), int):
        fail_if(version_problem(record.get("format"), record["version"]), where)
    top = r.take("manifest", record, TOP)
    fail_if(r.problems, f"{where}: not a manifest")
    r.check(top["config_sha256"] == sha256(canonical(top["config"])), "config: does not match config_sha256")
    r.check(all(isinstance(v, str) for v in top["aliases"].values()), "aliases: a value is not a key")
    fail_if(r.problems, f"{where}: not a manifest")
    header = ManifestHeader(
        family=top["family"], config=top["config"], component=top["component"],
        sources=tuple(s for w, v in r.items("sources", top["sources"]) if (s := _source(r, w, v))),
        skipped=tuple(k for w, v in r.items("skipped", top["skipped"]) if (k := _skipped(r, w, v))),
        aliases=top["aliases"], detail=top["detail"],
    )  # fmt: skip
    leaves = {p: leaf for p, v in top["leaves"].items() if (leaf := _leaf(r, p, v, PARAMS))}
    carried = {p: leaf for p, v in top["carried"].items() if (leaf := _leaf(r, f"{CARRIED}/{p}", v, CARRIED))}
    trained = top["opt_state"] or {}
    state = {p: leaf for p, v in trained.items() if (leaf := _leaf(r, f"{OPT_STATE}/{p}", v, OPT_STATE))}
    files = {p: f for p, v in top["files"].items() if (f := _file(r, p, v))}
    manifest = Manifest(header=header, leaves=leaves, carried=carried, files=files, producer=top["producer"],
                        opt_state=state, training=top["training"])  # fmt: skip
    r.problems += _file_problems(manifest)
    fail_if(r.problems, f"{where}: not a manifest")
    return manifest


def version_problem(format_name: Any, version: Any) -> list[str]:
    """Why this program cannot read a checkpoint of that format and version; empty if it can."""
    if format_name != FORMAT:
        return [f"format={format_name!r} is not {FORMAT!r}: this checkpoint was not written by shardzoo"]
    if isinstance(version, int) and version > VERSION:
        return [f"version={version} is newer than this program reads ({VERSION}): upgrade shardzoo"]
    if version != VERSION:
        return [f"version={version!r} is not one this program reads ({VERSION}): convert the source again"]
    return []


def _source(r: _Reader, where: str, record: Any) -> Source | None:
    before = len(r.problems)
    fields = r.take(where, record, SOURCE)
    r.check(fields["kind"] in KINDS, f"{where}: kind={_short(fields['kind'])} is not one of {', '.join(KINDS)}")
    r.check(
        fields["sha256"] is None or _is_hex(fields["sha256"], 64),
        f"{where}: sha256 is not 64 hexadecimal digits",
    )
    return Source(**fields) if len(r.problems) == before else None


def _skipped(r: _Reader, where: str, record: Any) -> Skipped | None:
    before = len(r.problems)
    fields = r.take(where, record, {"key": (str,), "reason": (str,)})
    return Skipped(**fields) if len(r.problems) == before else None


def _file(r: _Reader, path: str, record: Any) -> FileEntry | None:
    before = len(r.problems)
    digest = {"sha256": (str,)} if isinstance(record, dict) and "sha256" in record else {}
    fields = r.take(f"files[{path!r}]", record, {"size": (int,), **digest})
    r.check(is_below(path), f"files[{path!r}]: reaches outside the checkpoint")
    return FileEntry(**fields) if len(r.problems) == before else None


def is_below(path: str) -> bool:
    """Whether a relative path stays inside its folder, spelled the one plain way."""
    return (
        bool(path) and "\\" not in path and "\0" not in path and all(p not in ("", ".", "..") for p in path.split("/"))
    )


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def _leaf(r: _Reader, path: str, record: Any, item: str) -> Leaf | None:
    before = len(r.problems)
    f = r.take(path, record, LEAF)
    if len(r.problems) > before:
        return None
    dims = tuple(f["dims"].split())
    sizes = [f["shape"], f["outer"], f["inner"]]
    r.check(
        all(_is_size(n) for s in sizes for n in s),
        f"{path}: shape, outer or inner is not made of whole numbers",
    )
    r.check(all(len(s) == len(dims) for s in sizes) and len(set(dims)) == len(dims),
            f"{path}: dims {f['dims']!r} do not name the {len(f['shape'])} sizes once each")  # fmt: skip
    r.check(f["dtype"] in STORED, f"{path}: dtype={f['dtype']!r} is not a stored dtype")
    r.check(
        f["folder"] == (path if item == OPT_STATE else f"{item}/{path}") or (item == CARRIED and is_below(f["folder"])),
        f"{path}: wrong folder",
    )
    r.check(_is_hex(f["checksum"], 16), f"{path}: checksum is not 16 hexadecimal digits")
    good_split = all(
        d in dims and isinstance(a, list) and all(isinstance(x, str) for x in a) for d, a in f["split"].items()
    )
    r.check(good_split, f"{path}: split={_short(f['split'])} does not map its dims to mesh axes")
    r.check(all(isinstance(p, dict) for p in f["from"]), f"{path}: from is not a list of objects")
    if len(r.problems) > before:
        return None
    whole = all(o >= c >= 1 and o % c == 0 for o, c in zip(f["outer"], f["inner"], strict=True))
    if not r.check(whole, f"{path}: inner={f['inner']} does not divide outer={f['outer']}"):
        return None
    spec = LeafSpec(dims=dims, shape=tuple(f["shape"]), dtype=dtype_of(f["dtype"]),
                    split={d: tuple(a) for d, a in f["split"].items()})  # fmt: skip
    grid = Grid(shape=spec.shape, outer=tuple(f["outer"]), inner=tuple(f["inner"]))
    return Leaf(spec=spec, grid=grid, folder=f["folder"], checksum=f["checksum"], provenance=tuple(f["from"]))


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62


def _file_problems(manifest: Manifest) -> list[str]:
    """Data files that a grid implies and `files` lacks or gives another size."""
    problems = []
    for path, leaf in manifest.all_leaves().items():
        count = math.prod(-(-n // o) for n, o in zip(leaf.spec.shape, leaf.grid.outer, strict=True))
        if count > len(manifest.files):
            problems.append(f"{path}: its grid has {count} files, the manifest lists {len(manifest.files)} in all")
            continue
        for name, size in leaf.files().items():
            entry = manifest.files.get(name)
            if entry is None or entry.size != size:
                problems.append(f"{path}: its file {name} is not listed with {size} bytes")
    return problems
