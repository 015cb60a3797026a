"""Four processes of two CPU devices make the images that one process makes, from a pipeline's folder."""

from pathlib import Path

import numpy as np
import pytest
import tiny_images
from load_workers import load_workers
from processes import run

from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.pipeline_source import find_pipeline

workers = load_workers(Path(__file__).with_name("image_workers.py"))


@pytest.mark.slow
def test_four_processes_make_the_images_that_one_does(tmp_path):
    """A row is left over for the last device of `data`; every process has the whole of all images."""
    tiny_images.save("flux-schnell", tmp_path / "source")
    pipelines.convert(find_pipeline(tmp_path / "source"), tmp_path / "ours", sync=False)
    job = {"path": str(tmp_path / "ours"), "prompts": ["a fox", "", "an ox"]}
    alone = np.array(workers.pictures(**job, degrees={}))
    assert alone.shape == (3, 8, 12, 3) and alone.std() > 10
    found = run(
        workers.pictures,
        {**job, "degrees": {"data": 2, "context": 2, "tensor": 2}},
        processes=4,
        devices=2,
        timeout=400,
    )
    assert len(found) == 4
    for result in found:
        assert np.abs(np.array(result) - alone).max() <= 1
