"""Checking a checkpoint on disk: names, sizes and digests, and with `full` every value."""

import collections
import dataclasses as dc
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from shardzoo.checkpoints import pages, store, sums
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.checkpoint import open as open_checkpoint
from shardzoo.checkpoints.manifest import Leaf, sha256
from shardzoo.checkpoints.orbax_layout import (
    CHECKPOINT_METADATA,
    DIGEST_FILE,
    MANIFEST_FILE,
    MARKERS,
    MARKS_FILE,
    checkpoint_metadata,
    marks,
    marks_file,
)
from shardzoo.checkpoints.staging import listing
from shardzoo.checkpoints.stored import Reader
from shardzoo.errors import InputError, fail_if

LEVELS = ("quick", "full")
BUDGET = 128 << 20  # bytes of values in flight


@dc.dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found whole."""

    level: str
    files: int
    leaves: int
    nbytes: int


def verify(path: str | Path, level: str = "full", *, progress: Callable[[int], None] | None = None) -> Verified:
    """Checks a checkpoint against its manifest.

    `quick` compares names and sizes of all files and the digests of all but the data files. `full` also reads every
    value: each chunk against its crc32c, each leaf against its checksum. Any one bit that changed is found, by `quick`
    in metadata and by `full` everywhere.

    Args:
        progress: called with the number of bytes read since the last call.

    Raises:
        InputError: every missing, extra, truncated or damaged file and every wrong leaf, in one message.
    """
    if level not in LEVELS:
        raise InputError(f"verify: level={level!r} is not one of {', '.join(LEVELS)}")
    ckpt = open_checkpoint(path)
    problems = _file_problems(ckpt)
    if level == "full":
        problems += _value_problems(ckpt, progress or (lambda _: None))
    fail_if(problems, f"{ckpt.path}: damaged")
    manifest = ckpt.manifest
    return Verified(
        level=level, files=len(manifest.files), leaves=len(manifest.all_leaves()), nbytes=manifest.total_bytes
    )


def _file_problems(ckpt: Checkpoint) -> list[str]:
    manifest, encoded = ckpt.manifest, ckpt.manifest.encode()
    if manifest.training is not None:
        return _training_file_problems(ckpt, {MANIFEST_FILE: encoded, DIGEST_FILE: sha256(encoded).encode()})
    about = checkpoint_metadata(manifest.header.family, encoded, bool(manifest.carried))
    exact = {CHECKPOINT_METADATA: about, MANIFEST_FILE: encoded} | MARKERS
    return _listing_problems(ckpt, exact, listing(ckpt.path))


def _training_file_problems(ckpt: Checkpoint, exact: Mapping[str, bytes]) -> list[str]:
    """As of any checkpoint, but that what Orbax writes last is held against digests that were taken afterwards."""
    found = listing(ckpt.path)
    aside = {*marks(found), MARKS_FILE}
    problems = _listing_problems(ckpt, exact, {name: size for name, size in found.items() if name not in aside})
    return problems + (_marks_problems(ckpt.path, marks(found)) if MARKS_FILE in found else [])


def _marks_problems(root: Path, names: Iterable[str]) -> list[str]:
    data = (root / MARKS_FILE).read_bytes()
    try:
        noted = json.loads(data)
        sound = isinstance(noted, dict) and marks_file(noted) == data
    except ValueError:
        sound = False
    if not sound:
        return [f"{MARKS_FILE}: its content is not what was written (not the JSON that it was)"]
    now = {name: sha256((root / name).read_bytes()) for name in names}
    problems = [f"{name}: missing" for name in sorted({*noted} - {*now})]
    problems += [f"{name}: not a file of this checkpoint" for name in sorted({*now} - {*noted})]
    return problems + [
        f"{name}: its content is not what was written (sha256 differs)"
        for name in sorted({*noted} & {*now})
        if noted[name] != now[name]
    ]


def _listing_problems(ckpt: Checkpoint, exact: Mapping[str, bytes], found: Mapping[str, int]) -> list[str]:
    """Holds the files that were `found` against the manifest's, and those of which the `exact` bytes are known."""
    manifest = ckpt.manifest
    digests = {name: entry.sha256 for name, entry in manifest.files.items() if entry.sha256}
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    for name, data in exact.items():
        digests[name], sizes[name] = sha256(data), len(data)
    problems = [f"{name}: missing" for name in sizes if name not in found]
    problems += [f"{name}: not a file of this checkpoint" for name in sorted(found) if name not in sizes]
    problems += [f"{name}: {found[name]:,} bytes, not {n:,}" for name, n in sizes.items() if found.get(name, n) != n]
    for name, digest in digests.items():
        if found.get(name) == sizes[name] and sha256((ckpt.path / name).read_bytes()) != digest:
            problems.append(f"{name}: its content is not what was written (sha256 differs)")
    return problems


def _value_problems(ckpt: Checkpoint, progress: Callable[[int], None]) -> list[str]:
    """Reads every file of every leaf; each leaf whose files are sound is held against its checksum."""
    problems: list[str] = []
    waiting: collections.deque = collections.deque()
    totals: dict[str, sums.Sums] = {}
    unread: set[str] = set()
    free, room = BUDGET, pages.Room()

    def settle() -> int:
        path, leaf, at, read = waiting.popleft()
        try:
            block = np.asarray(read.result())
            part = sums.of_block(block, tuple(s.start for s in at), leaf.spec.shape, room)
            totals[path] = sums.add(totals[path], part)
        except (ValueError, OSError) as error:
            problems.append(f"{path}: {str(error).splitlines()[0][:400]}")
            unread.add(path)
        nbytes = store.nbytes(at, leaf.spec.dtype.itemsize)
        progress(nbytes)
        return nbytes

    with Reader() as reader:
        for path, leaf in ckpt.manifest.all_leaves().items():
            totals[path] = (0, 0)
            array = reader.open(ckpt.path / leaf.folder, leaf.spec, leaf.grid)
            for at in leaf.grid.blocks():
                nbytes = store.nbytes(at, leaf.spec.dtype.itemsize)
                while waiting and free < nbytes:
                    free += settle()
                waiting.append((path, leaf, at, array.at(at).read()))
                free -= nbytes
        while waiting:
            settle()
    read = {path: total for path, total in totals.items() if path not in unread}
    return problems + [p for path, total in read.items() if (p := _sum_problem(path, ckpt.leaf(path), total))]


def _sum_problem(path: str, leaf: Leaf, total: sums.Sums) -> str | None:
    found = sums.text(total)
    if found == leaf.checksum:
        return None
    return f"{path}: files sound, but not with the values written (checksum {found}, not {leaf.checksum})"
