"""A folder of checkpoints that make one pipeline, and `pipeline.json`, which names them and says what else it needs.

The file is written last, so that a folder without it is not a pipeline. Small files of the source, the tokenizer's
among them, lie below `files` as they came.
"""

import dataclasses as dc
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardzoo.checkpoints import checkpoint
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.manifest import FileEntry, canonical, is_below, sha256
from shardzoo.checkpoints.store import sync_folder, write_file
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import parse_object

PIPELINE = "pipeline.json"
PARTIAL = (
    "pipeline.partial.json"  # of the converter: component -> identity of what is being converted, while that lasts
)
FILES = "files"
LONGEST_NAME = 200  # bytes of a component's name: file systems take 255, with what is added while it is written
FORMAT, VERSION = "shardzoo pipeline", 1


@dc.dataclass(frozen=True, kw_only=True)
class Component:
    """One checkpoint of a pipeline: its family, and where it was in the source (a folder or a file)."""

    family: str
    place: str


@dc.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What `pipeline.json` says.

    Attributes:
        path: the folder.
        kind: "wan", ...: what runs it.
        layout: of the source: "diffusers" or "original".
        components: name, which is that of the folder -> component.
        files: path below `files`, as in the source -> size and digest.
        settings: what the pipeline's own config files say, JSON.
    """

    path: Path
    kind: str
    layout: str
    components: Mapping[str, Component]
    files: Mapping[str, FileEntry]
    settings: Mapping[str, Any]

    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of a component, opened.

        Raises:
            InputError: there is none of this name, it cannot be opened, or it is of another family.
        """
        self.require([name])
        found = checkpoint.open(self.path / name)
        wanted = self.components[name].family
        if found.manifest.header.family != wanted:
            raise InputError(
                f"{self.path / name}: is of family {found.manifest.header.family!r}, and {PIPELINE} says {wanted!r}:"
                " convert it again"
            )
        return found

    def require(self, names: list[str]) -> None:
        """Refuses a pipeline that lacks any of these components."""
        absent = [name for name in names if name not in self.components]
        if absent:
            raise InputError(
                f"{self.path}: this pipeline has no {', '.join(map(repr, absent))}, it has"
                f" {', '.join(self.components)}: choose among these, or convert with --component {absent[0]}"
            )

    def file(self, name: str) -> Path:
        """Where a small file is."""
        return self.path / FILES / name

    def read(self, name: str) -> bytes:
        """A small file.

        Raises:
            InputError: it is not there or not as it was.
        """
        problem, data = self._checked(name)
        fail_if([problem] if problem else [], f"{self.path}: convert again")
        return data

    def write(self, *, sync: bool = True) -> None:
        """Writes `pipeline.json`: whole or not at all."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            "producer": f"shardzoo {importlib.metadata.version('shardzoo')}",
            "kind": self.kind,
            "layout": self.layout,
            "components": {name: dc.asdict(one) for name, one in self.components.items()},
            "files": {name: dc.asdict(entry) for name, entry in self.files.items()},
            "settings": dict(self.settings),
        }
        new = self.path / (PIPELINE + ".new")
        write_file(new, canonical(record | {"sha256": _digest(record)}), sync=sync)
        os.replace(new, self.path / PIPELINE)
        sync_folder(self.path)

    def damaged_files(self) -> list[str]:
        """What is wrong with the small files."""
        return [problem for name in self.files if (problem := self._checked(name)[0])]

    def _checked(self, name: str) -> tuple[str | None, bytes]:
        """What is wrong with a small file, and its bytes."""
        try:
            data = self.file(name).read_bytes()
        except OSError as error:
            return f"{FILES}/{name}: cannot be read ({error.strerror})", b""
        entry = self.files[name]
        same = len(data) == entry.size and sha256(data) == entry.sha256
        return None if same else f"{FILES}/{name}: is not as it was when it was converted", data


def is_pipeline(path: str | Path) -> bool:
    """Whether this is a pipeline's folder, whole."""
    return (Path(path) / PIPELINE).is_file()


def is_component_name(name: str) -> bool:
    """Whether a component may be called this: a plain folder name that means nothing else in a pipeline's folder."""
    plain = is_below(name) and "/" not in name and name.isprintable() and not name.startswith(".")
    return plain and len(name.encode()) <= LONGEST_NAME and name not in (PIPELINE, PARTIAL, FILES)


def is_unfinished(path: str | Path) -> bool:
    """Whether this is the folder of a pipeline that the converter has not finished."""
    return (Path(path) / PARTIAL).is_file() and not is_pipeline(path)


def open_pipeline(path: str | Path) -> Pipeline:
    """Reads `pipeline.json`; opens no checkpoint.

    Raises:
        InputError: there is none, it is damaged, or of a newer version.
    """
    where = Path(path) / PIPELINE
    try:
        data = where.read_bytes()
    except OSError as error:
        if (Path(path) / PARTIAL).is_file():
            raise InputError(f"{path}: is an unfinished pipeline: run the command that was writing it again") from error
        raise InputError(f"{where}: cannot be read ({error.strerror})") from error
    record = parse_object(data, str(where))
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        raise InputError(
            f"{where}: format={record.get('format')!r} version={record.get('version')!r} is not {FORMAT!r} {VERSION},"
            " which this program reads: upgrade shardzoo, or convert the source again"
        )
    fail_if(_problems(record), f"{where}: is damaged")
    return Pipeline(
        path=Path(path),
        kind=record["kind"],
        layout=record["layout"],
        components={name: Component(**one) for name, one in record["components"].items()},
        files={name: FileEntry(**entry) for name, entry in record["files"].items()},
        settings=record["settings"],
    )


def _digest(record: Mapping[str, Any]) -> str:
    """Of all but itself: a shift with one bit changed would still read well."""
    return sha256(canonical({name: value for name, value in record.items() if name != "sha256"}))


def _problems(record: Mapping[str, Any]) -> list[str]:
    kinds = {"kind": str, "layout": str, "components": dict, "files": dict, "settings": dict}
    problems = [
        f"{name} is not a {kind.__name__}" for name, kind in kinds.items() if type(record.get(name)) is not kind
    ]
    if problems:
        return problems
    for name, one in record["components"].items():
        good = (
            isinstance(one, dict) and set(one) == {"family", "place"} and all(isinstance(v, str) for v in one.values())
        )
        if not good:
            problems.append(f"component {name!r} does not hold a family and a place")
        elif not is_component_name(name) or not (one["place"] == "." or is_below(one["place"])):
            problems.append(f"component {name!r} at {one['place']!r} reaches outside the folder")
    for name, entry in record["files"].items():
        good = isinstance(entry, dict) and set(entry) == {"size", "sha256"} and type(entry["size"]) is int
        if not good or not isinstance(entry["sha256"], str) or not is_below(name):
            problems.append(f"file {name!r} does not hold a size and a digest")
    if record.get("sha256") != _digest(record):
        problems.append("it does not match its own sha256: convert again")
    return problems
