"""One folder in the place of another, and one process at a time in a folder."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardzoo.checkpoints.manifest import MANIFEST
from shardzoo.checkpoints.store import sync_folder, writable_folder
from shardzoo.errors import InputError

# Beside the folder that is replaced: the next one until it is whole, and the last one until it is removed.
NEW, REPLACED = ".shardzoo-new", ".shardzoo-replaced"


def has_manifest(path: Path) -> bool:
    """Whether this is the folder of a checkpoint that has a manifest, which one of plain Orbax has not."""
    return (path / MANIFEST / "metadata").is_file()


def check_place(dst: Path, source: str | Path) -> None:
    """Refuses a destination that will not do, before anything is read.

    Raises:
        InputError: it is what is read or a folder that holds it, which whoever clears the destination would lose; it
            lies within a checkpoint, which would not be whole with it; both also through links. Nothing can be written
            there.
    """
    read, place = (Path(os.path.realpath(path)) for path in (source, dst))
    if os.path.lexists(source) and (place == read or place in read.parents):  # else it may be an address
        what = "is what is to be read" if place == read else f"holds {source}, which is to be read"
        raise InputError(f"{dst}: {what}: choose another destination")
    folder = Path(os.path.realpath(dst.parent))
    whole = next((one for one in (folder, *folder.parents) if has_manifest(one)), None)
    if whole is not None:
        raise InputError(
            f"{dst}: lies within the checkpoint {whole}, which would not be whole: choose another destination"
        )
    writable_folder(dst)


@contextlib.contextmanager
def locked(folder: Path, dst: Path) -> Iterator[None]:
    """Holds a folder for this process; the lock is the folder's own, so that it lasts through a rename.

    Raises:
        InputError: another process holds it, or has renamed or removed it just now; the message speaks of `dst`.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.path.samestat(os.fstat(handle), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            here = False
        if not here:
            raise InputError(f"{dst}: another process is writing it: wait for that, or choose another destination")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(target: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A place for a new folder that takes the name of the old one when the block ends without an error.

    Between its two renames nothing is at `target`; stopped there, the next call puts the old folder back.

    Raises:
        InputError: what is at `target` is not `is_ours`, or another process is replacing it.
    """
    new, old = (target.with_name(target.name + suffix) for suffix in (NEW, REPLACED))
    if not os.path.lexists(target) and is_ours(old):
        os.rename(old, target)
    if not os.path.lexists(target):
        yield target
        return
    if not is_ours(target):
        raise InputError(f"{target}: exists, and is not something to be replaced: choose another destination")
    with locked(target, target):
        for leftover in (new, old):
            if os.path.lexists(leftover):
                with locked(leftover, target):  # an earlier run that holds it is still removing it
                    shutil.rmtree(leftover)
        yield new
        os.rename(target, old)
        os.rename(new, target)
        sync_folder(target.parent)
        shutil.rmtree(old)
