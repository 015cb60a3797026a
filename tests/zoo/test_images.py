"""Images for CLIP: resized as PyTorch interpolates and as Pillow resamples, normed and cut as the originals do."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from shardzoo.zoo import images

SIZES = [
    (480, 832, 224), (720, 1280, 224), (721, 1281, 224), (300, 200, 224), (224, 224, 224), (100, 37, 224),
    (57, 133, 28), (31, 31, 30), (9, 700, 8),
]  # fmt: skip


@pytest.mark.parametrize("height, width, size", [*SIZES, (1, 5, 7), (2, 2, 9)])
def test_stretched_is_what_the_wan_repositories_do(height, width, size):
    frames = np.random.default_rng(height).uniform(-1, 1, (2, 3, height, width)).astype(np.float32)
    resized = torch.nn.functional.interpolate(
        torch.tensor(frames), size=(size, size), mode="bicubic", align_corners=False
    )
    mean, std = (torch.tensor(x)[:, None, None] for x in (images.MEAN, images.STD))
    want = ((resized * 0.5 + 0.5 - mean) / std).numpy()
    got = np.asarray(images.stretched(frames, size))
    assert got.shape == (2, 3, size, size) and got.dtype == np.float32
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("height, width, size", SIZES)
def test_cropped_is_what_transformers_does(height, width, size):
    pixels = np.random.default_rng(width).integers(0, 256, (2, height, width, 3)).astype(np.uint8)
    processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    want = processor(images=[Image.fromarray(x) for x in pixels], return_tensors="np")["pixel_values"]
    got = np.asarray(images.cropped(pixels, size))
    assert got.shape == want.shape and got.dtype == np.float32
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()  # a byte that is one off would be 1e-2


def test_what_the_processor_does_by_default_is_what_cropped_does():
    processor = CLIPImageProcessorPil()
    assert processor.size["shortest_edge"] == 224 and dict(processor.crop_size) == {"height": 224, "width": 224}
    np.testing.assert_array_equal(np.float32(processor.image_mean), images.MEAN)
    np.testing.assert_array_equal(np.float32(processor.image_std), images.STD)


def test_extreme_bytes_do_not_wrap_around():
    """Sharp edges overshoot both ways: Pillow cuts off at 0 and 255."""
    pixels = np.where(np.random.default_rng(0).random((1, 90, 61, 3)) < 0.5, 0, 255).astype(np.uint8)
    want = np.asarray(Image.fromarray(pixels[0]).resize((224, 330), Image.Resampling.BICUBIC))[53:277]
    got = np.asarray(images.cropped(pixels)) * images.STD[:, None, None] + images.MEAN[:, None, None]
    np.testing.assert_array_equal(np.rint(got[0].transpose(1, 2, 0) * 255), want)
