"""Pictures in, videos and pictures out, by the packages of the extra `media`."""

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints.store import storage_error
from shardzoo.errors import InputError

VIDEO, IMAGE = ".mp4", ".png"
WHITE = 2**16 - 1  # of grey of 16 bits


def need_packages(*names: str) -> None:
    """Refuses to start where a package is missing that the end of the work needs.

    Raises:
        InputError: what to install.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"generate needs {' and '.join(missing)}: pip install 'shardzoo[media]'")


class NoWhite(ValueError):
    """Grey of numbers that do not say which is white."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of Pillow in three channels, as `zoo.pipelines` takes it.

    Raises:
        NoWhite: grey of numbers that do not say which is white.
    """

    opened: Any

    def __post_init__(self) -> None:
        if self.opened.mode != "RGB":
            object.__setattr__(self, "opened", _eight_bits(self.opened).convert("RGB"))

    @property
    def height(self) -> int:
        return self.opened.height

    @property
    def width(self) -> int:
        return self.opened.width

    def stretched(self, height: int, width: int) -> np.ndarray:
        """The whole of it as bytes [height, width, 3]."""
        import PIL.Image

        if self.opened.size == (width, height):
            return np.asarray(self.opened)
        return np.asarray(self.opened.resize((width, height), PIL.Image.Resampling.LANCZOS))

    def covering(self, height: int, width: int) -> np.ndarray:
        """Bytes [height, width, 3]: scaled until it covers that size, and the middle cut out."""
        import PIL.Image
        import PIL.ImageOps

        if self.opened.size == (width, height):
            return np.asarray(self.opened)
        return np.asarray(PIL.ImageOps.fit(self.opened, (width, height), PIL.Image.Resampling.LANCZOS))


def read_picture(path: Path) -> Picture:
    """A picture, upright and in three channels.

    Raises:
        InputError: it cannot be read.
    """
    need_packages("PIL")
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(path) as opened:
            upright = PIL.ImageOps.exif_transpose(opened)
            upright.load()
            return Picture(upright)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        known = isinstance(error, OSError) and error.strerror
        reason = known or (str(error) if isinstance(error, NoWhite) else "it is no picture")
        raise InputError(f"{path}: cannot be read as a picture ({reason}): give a PNG or JPEG file") from error


def _eight_bits(picture: Any) -> Any:
    """Grey of 16 bits as grey of 8, which Pillow would clip; other pictures as they are.

    Raises:
        NoWhite: grey without a known white: floating-point numbers, or whole ones outside 16 bits.
    """
    import PIL.Image

    if not picture.mode.startswith(("I", "F")):
        return picture
    grey = np.asarray(picture)
    if picture.mode == "F" or grey.min() < 0 or grey.max() > WHITE:
        raise NoWhite("its grey is of numbers without a known white")
    return PIL.Image.fromarray(((grey.astype(np.uint32) * 255 + WHITE // 2) // WHITE).astype(np.uint8))


def check_output(path: Path, *, overwrite: bool, video: bool, count: int) -> None:
    """Refuses an output that cannot be written, before any work is done.

    Args:
        path: where to write.
        overwrite: what an earlier run wrote there may be replaced.
        video: whether frames of a video are written, or this many images.
        count: how many images.

    Raises:
        InputError: it exists, has no folder to lie in, cannot hold all of them, or needs packages that are missing.
    """
    need_packages(*(("imageio_ffmpeg",) if path.suffix == VIDEO else ("PIL",)))
    file = VIDEO if video else IMAGE
    if not path.name:
        raise InputError(f"{path}: has no name of its own, by which it could be replaced: name a {file} file or folder")
    if path.suffix not in (file, ""):
        raise InputError(f"{path}: is neither a {file} file nor the name of a folder for PNG files: change it")
    if path.suffix == IMAGE and count > 1:
        raise InputError(f"{path}: is one file for {count} images: give the name of a folder")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}: make it, or choose another output")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another output") from error
    if os.path.lexists(path) and not (overwrite and _ours(path)):
        hint = "pass --overwrite" if _ours(path) else "remove it"
        raise InputError(f"{path}: exists already: {hint}, or choose another output")


def _ours(path: Path) -> bool:
    """Whether this is what an earlier run may have written: a file, or a folder of pictures alone; no link."""
    if path.is_symlink():
        return False
    if path.suffix:
        return path.is_file()
    return path.is_dir() and all(entry.suffix == IMAGE for entry in path.iterdir())


def write_frames(path: Path, pieces: Iterable[np.ndarray], fps: int | None) -> int:
    """Writes frames [n, height, width, 3] as they come, to a video, a folder of pictures or one; how many there were.

    A video needs `fps`, frames a second. What is at `path` is replaced once all are written; on an error nothing is
    left.

    Raises:
        InputError: the storage is full or failed, or the encoder did.
    """
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    _remove(part)
    try:
        if path.suffix == VIDEO:
            assert fps is not None
            count = _write_video(part, pieces, fps)
        else:
            count = _write_pictures(part, pieces)
        if not path.suffix:
            _remove(path)
        os.replace(part, path)
    except OSError as error:
        raise storage_error(str(path), error, path.parent) from error
    finally:
        _remove(part)
    return count


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_video(path: Path, pieces: Iterable[np.ndarray], fps: int) -> int:
    """H.264 of high quality. The process is started here: as imageio starts it, a fork would run through JAX's threads.

    Raises:
        InputError: the encoder failed; with what it said.
    """
    count, encoder = 0, None
    try:
        for frame in _each(pieces):
            if encoder is None:
                encoder = _encoder(path, frame.shape, fps)
            assert encoder.stdin is not None
            encoder.stdin.write(np.ascontiguousarray(frame).data)
            count += 1
    except BrokenPipeError:
        pass  # it says why below
    finally:
        said = b"" if encoder is None else encoder.communicate()[1]
    if encoder is not None and encoder.returncode:
        raise InputError(f"{path}: the video cannot be written ({said.decode(errors='replace').strip()[-300:]})")
    return count


def _encoder(path: Path, shape: tuple[int, ...], fps: int) -> subprocess.Popen[bytes]:
    import imageio_ffmpeg

    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{shape[1]}x{shape[0]}", "-r", str(fps), "-i", "-"]
    wanted = ["-an", "-c:v", "libx264", "-crf", "16", "-pix_fmt", "yuv420p", str(path.absolute())]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *given, *wanted]
    # In a process group of its own, Ctrl-C ends our work first and then this.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)


def _write_pictures(path: Path, pieces: Iterable[np.ndarray]) -> int:
    """Each frame to a file of its own in a folder; to a name of a file, the only one."""
    import PIL.Image

    alone = path.suffix == IMAGE
    if not alone:
        path.mkdir()
    count = 0
    for frame in _each(pieces):
        PIL.Image.fromarray(frame).save(path if alone else path / f"{count:05d}{IMAGE}")
        count += 1
    return count


def _each(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    return (frame for piece in pieces for frame in piece)
