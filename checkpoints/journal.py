"""The journal of an unfinished checkpoint: which leaves are whole, so that a second run carries on from there."""

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

from shardzoo.checkpoints.manifest import Json, canonical


def _line(record: Json) -> bytes:
    body = canonical(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read(path: Path) -> list[Json]:
    """The records of a journal up to the first line that is torn or damaged; none if there is no journal."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        digest, _, body = line.partition(b" ")
        if digest != b"%08x" % zlib.crc32(body):
            break
        records.append(json.loads(body))
    return records


class Journal:
    """Appends records to the journal at `path`; each is in the file system before `add` returns.

    `records` are those of an earlier run, if it had the same `plan`.
    """

    def __init__(self, path: Path, plan: str):
        found = read(path)
        same = bool(found) and found[0] == {"plan": plan}
        self.path = path
        self.records: list[Json] = found[1:] if same else []
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"".join(_line(r) for r in ({"plan": plan}, *self.records)))
        os.replace(fresh, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

    def add(self, record: dict[str, Any]) -> None:
        """Appends one record.

        Raises:
            OSError: it could not be written whole.
        """
        line = _line(record)
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()
