"""Places that will not do are refused before anything is read; folders with GGUF files alone are told as such."""

import errno
import os
from pathlib import Path

import pytest
import tiny_models

from shardzoo.checkpoints.store import storage_error
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.convert.folder import find_weights
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError


def test_nothing_is_written_within_a_checkpoint(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")
    convert(source, tmp_path / "ckpt", sync=False)
    (tmp_path / "link").symlink_to(tmp_path / "ckpt" / "params")
    for place in (tmp_path / "ckpt" / "out", tmp_path / "ckpt" / "new" / "out", tmp_path / "link" / "out"):
        with pytest.raises(InputError, match=r"lies within the checkpoint .*ckpt, .*choose another destination"):
            export(tmp_path / "ckpt", place)
        with pytest.raises(InputError, match="lies within the checkpoint"):
            convert(source, place)
    verify(tmp_path / "ckpt")
    convert(source, source / "ckpt", sync=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_read_is_no_destination(tmp_path, overwrite):
    """Nor is a folder round it: both are there already, and clearing them, as is said of others, would lose it."""
    source = tiny_models.save("llama", tmp_path / "all" / "source")
    file = next(source.glob("*.safetensors"))
    convert(source, source / "ckpt", sync=False)
    (tmp_path / "link").symlink_to(source)
    for place in (source, tmp_path / "link", source / ".." / "source"):
        with pytest.raises(InputError, match="is what is to be read: choose another destination"):
            convert(source, place, overwrite=overwrite)
    with pytest.raises(InputError, match="is what is to be read"):
        convert(file, file, overwrite=overwrite)
    with pytest.raises(InputError, match="is what is to be read"):
        export(source / "ckpt", source / "ckpt", overwrite=overwrite)
    for run, given, place in ((convert, source, tmp_path / "all"), (export, source / "ckpt", source)):
        with pytest.raises(InputError, match=r"holds .*, which is to be read: choose another"):
            run(given, place, overwrite=overwrite)
    verify(source / "ckpt", source)


@pytest.mark.parametrize("run", [convert, export])
def test_a_place_that_cannot_be_written_is_refused_before_the_source_is_read(tmp_path, run):
    (tmp_path / "file").write_text("")
    places = {tmp_path / "file" / "out": "is not a folder: choose another", Path("/proc/out"): "choose another"}
    for place, words in places.items():
        with pytest.raises(InputError, match=words):
            run(tmp_path / "nowhere", place)


@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.EROFS, errno.ENOENT, errno.EACCES])
def test_a_place_that_will_not_do_is_not_to_be_tried_again(tmp_path, number):
    text = str(storage_error("out", OSError(number, os.strerror(number)), tmp_path))
    assert "choose another" in text and "run again" not in text
    assert "run again" in str(storage_error("out", OSError(errno.EIO, "broken"), tmp_path))


def test_a_folder_with_gguf_alone(tmp_path):
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"no weights but model-Q4\.gguf, and GGUF is not read: give the safetensors"):
        find_weights(tmp_path)
