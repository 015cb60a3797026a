"""The folder that a checkpoint is written in until it is whole: lock, checks before the first byte, publishing."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from shardzoo.checkpoints.journal import Journal
from shardzoo.checkpoints.manifest import ASSETS, CARRIED, MANIFEST, PARAMS, FileEntry, Manifest, is_below, sha256
from shardzoo.checkpoints.orbax_layout import (
    CHECKPOINT_METADATA,
    MANIFEST_FILE,
    MARKERS,
    STAGING_SUFFIX,
    checkpoint_metadata,
    metadata_files,
)
from shardzoo.checkpoints.store import storage_error, sync_folder, write_file
from shardzoo.errors import InputError, fail_if

JOURNAL = "shardzoo.journal"
# All that a killed run may leave at the top: one interrupted as it cleans up or publishes may lack the journal.
OURS = {JOURNAL, "shardzoo.new", PARAMS, CARRIED, MANIFEST, CHECKPOINT_METADATA, *MARKERS}


def staging_path(dst: Path) -> Path:
    """Where the checkpoint `dst` is written until it is whole: beside it, so that a rename publishes it."""
    return dst.with_name(dst.name + STAGING_SUFFIX)


class Staging:
    """An unfinished checkpoint, held by a lock on its folder that ends with the process.

    Attributes:
        dst: where it will be.
        root: the folder it is written in.
        journal: records of this run and, if the plan is the same, of an earlier one.

    Raises:
        InputError: the destination exists, is not writable or too small, another process is writing it, or the
            folder beside it was left by some other program.
    """

    def __init__(self, dst: Path, plan: str, *, restart: bool = False):
        self.dst = Path(os.path.abspath(dst))
        self.root = staging_path(self.dst)
        self._lock = -1
        check_destination(self.dst)
        try:
            self.dst.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(str(self.dst), error, self.dst.parent) from error
        try:
            self._take_lock()
            check_destination(self.dst)
            if restart:
                self._clear()
            self.journal = Journal(self.root / JOURNAL, plan)
            if not self.journal.records:
                self._clear()
        except OSError as error:
            self.close()
            raise storage_error(str(self.dst), error, self.root) from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        """Locks the folder itself, so that the lock is held until after the rename; NFS keeps it to one machine."""
        self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(self._lock), os.lstat(self.root))
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:  # or published or removed by its holder since it was opened
            raise InputError(f"{self.dst}: another process is writing it: wait for that, or choose another destination")
        other = sorted(set(os.listdir(self.root)) - OURS)
        if other:
            raise InputError(
                f"{self.root}: holds {other[0]!r}, left by another program: remove it, or choose another destination"
            )

    def _clear(self) -> None:
        """Removes everything but the journal."""
        for entry in os.scandir(self.root):
            if entry.name == JOURNAL:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def require_space(self, nbytes: int) -> None:
        """Refuses to start what cannot end.

        Raises:
            InputError: fewer than `nbytes` and 2 % are free.
        """
        info = os.statvfs(self.root)
        free, need = info.f_bavail * info.f_frsize, nbytes + nbytes // 50
        if free < need:
            raise InputError(
                f"{self.dst}: needs {need:,} bytes, {free:,} are free at {self.dst.parent}:"
                " free some, or choose another destination"
            )

    def publish(self, manifest: Manifest, *, sync: bool = True) -> Path:
        """Writes the metadata, checks that exactly the listed files are there, and renames the folder to its name."""
        self.journal.close()
        encoded = manifest.encode()
        files = metadata_files(manifest)
        files[MANIFEST_FILE] = encoded
        files[CHECKPOINT_METADATA] = checkpoint_metadata(manifest.header.family, encoded, bool(manifest.carried))
        try:
            for name, data in (files | MARKERS).items():
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists() or path.read_bytes() != data:  # zarr.json is there since its leaf was begun
                    write_file(path, data, sync=sync)
            self._check_listing(manifest, files)
            if sync:
                for folder, _, _ in os.walk(self.root):
                    sync_folder(Path(folder))
            check_destination(self.dst)
            os.unlink(self.root / JOURNAL)
            os.rename(self.root, self.dst)
            sync_folder(self.dst.parent)
        except OSError as error:
            raise storage_error(str(self.dst), error, self.dst.parent) from error
        finally:
            self.close()
        return self.dst

    def _check_listing(self, manifest: Manifest, written: Mapping[str, bytes]) -> None:
        expected = {name: entry.size for name, entry in manifest.files.items()}
        expected |= {name: len(data) for name, data in {**written, **MARKERS}.items()}
        found = listing(self.root)
        found.pop(JOURNAL, None)
        problems = [f"{n}: missing" for n in sorted(set(expected) - set(found))]
        problems += [f"{n}: not a file of this checkpoint" for n in sorted(set(found) - set(expected))]
        problems += [f"{n}: {found[n]} bytes, not {s}" for n, s in expected.items() if found.get(n, s) != s]
        fail_if(problems, f"{self.root}: changed while it was being written")

    def close(self) -> None:
        """Lets go of the lock; what is written stays for a later run to carry on."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """Removes everything written so far; does nothing once published."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._clear()
                (self.root / JOURNAL).unlink(missing_ok=True)
                self.root.rmdir()
        self.close()


def check_destination(dst: Path) -> None:
    """Refuses a destination that exists, whatever it is.

    Raises:
        InputError: it exists, or is named like an unfinished checkpoint.
    """
    if dst.name.endswith(STAGING_SUFFIX) or not dst.name:
        raise InputError(f"{dst}: is not a name for a checkpoint: leave out {STAGING_SUFFIX}")
    if os.path.lexists(dst):
        raise InputError(f"{dst}: exists already: remove it, or choose another destination")


def listing(root: Path) -> dict[str, int]:
    """Path below `root` -> size of every file; anything that is neither file nor folder has size -1."""
    found = {}
    for folder, names, files in os.walk(root):
        links = [n for n in names if os.path.islink(os.path.join(folder, n))]
        for name in [*files, *links]:
            path = os.path.join(folder, name)
            plain = os.path.isfile(path) and not os.path.islink(path)
            found[os.path.relpath(path, root)] = os.path.getsize(path) if plain else -1
    return found


def store_assets(folder: Path, assets: Mapping[str, Path | bytes], *, sync: bool = True) -> dict[str, FileEntry]:
    """Copies small files to the `folder` of assets; returns their entries.

    Raises:
        InputError: a name that reaches outside, or a file that cannot be read; all in one message.
    """
    entries, problems = {}, []
    for name, content in assets.items():
        if not is_below(name):
            problems.append(f"assets: name {name!r} reaches outside the checkpoint: give it a plain relative name")
            continue
        try:
            data = content if isinstance(content, bytes) else Path(content).read_bytes()
        except OSError as error:
            problems.append(f"{error.filename}: cannot be read ({error.strerror})")
            continue
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, data, sync=sync)
        except OSError as error:
            raise storage_error(name, error, folder) from error
        entries[f"{ASSETS}/{name}"] = FileEntry(size=len(data), sha256=sha256(data))
    fail_if(problems, "files to carry along")
    return entries
