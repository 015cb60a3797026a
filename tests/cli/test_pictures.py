"""Pictures that are read: grey of 16 bits, which Pillow would clip to white, and shapes too long to edit."""

import resource

import numpy as np
import PIL.Image
import pytest

from shardzoo.cli import media, page
from shardzoo.errors import InputError
from shardzoo.zoo import qwen_image_pipeline


def test_grey_of_16_bits_is_scaled(tmp_path):
    grey = np.random.default_rng(0).integers(0, 2**16, (5, 7)).astype(np.uint16)
    grey[0, :2] = 0, 2**16 - 1
    PIL.Image.fromarray(grey).save(tmp_path / "grey.png")
    found = media.read_picture(tmp_path / "grey.png").stretched(5, 7)
    want = np.round(grey.astype(np.float64) * 255 / 65535).astype(np.uint8)
    np.testing.assert_array_equal(found, np.repeat(want[:, :, None], 3, axis=2))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA"])
def test_pictures_of_other_modes_have_three_channels(mode):
    drawn = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)).convert(mode)
    for size in ((6, 8), (3, 4)):
        for found in (media.Picture(drawn).stretched(*size), media.Picture(drawn).covering(*size)):
            assert found.shape == (*size, 3) and found.dtype == np.uint8
    np.testing.assert_array_equal(media.Picture(drawn).stretched(6, 8), np.asarray(drawn.convert("RGB")))


@pytest.mark.parametrize("grey", [np.ones((2, 2), np.float32), np.full((2, 2), 70000, np.int32)])
def test_numbers_without_a_known_white_are_refused(tmp_path, grey):
    PIL.Image.fromarray(grey).save(tmp_path / "grey.tiff")
    with pytest.raises(InputError, match="its grey is of numbers without a known white"):
        media.read_picture(tmp_path / "grey.tiff")


@pytest.mark.parametrize(("size", "refused"), [((1, 100_000), True), ((600, 10), False), ((2300, 10), False)])
def test_pictures_too_long_to_edit(size, refused):
    """The bound is that of the language model's processor on the picture as it is scaled for it."""
    settings = qwen_image_pipeline.Settings(seen_area=384 * 384)
    problems = list(qwen_image_pipeline._picture_problems(settings, media.Picture(PIL.Image.new("RGB", size[::-1]))))
    assert len(problems) == refused and all("more than 200 to 1: cut it" in problem for problem in problems)


@pytest.mark.parametrize("name", ["a.png", "pictures", "audit.html"])
def test_a_storage_that_fails_is_named_with_what_was_to_be_there(tmp_path, name):
    """What was there before stays, and nothing else is left."""
    path, (before, hard) = tmp_path / name, resource.getrlimit(resource.RLIMIT_FSIZE)
    if path.suffix:
        path.write_text("an earlier one")
    noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3)).astype(np.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InputError, match=f"{name}: the storage failed at {tmp_path} .*File too large"):
            media.write_frames(path, [noise], None) if "html" not in name else page.write(path, [], "title")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ([name] if path.suffix else [])
    assert not path.suffix or path.read_text() == "an earlier one"
