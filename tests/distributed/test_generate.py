"""Two processes of four CPU devices generate the text that one process generates."""

from pathlib import Path

import pytest
import tiny_llama
from load_workers import load_workers
from processes import run

from shardzoo.convert.convert import convert

workers = load_workers(Path(__file__).with_name("generate_workers.py"))
PROMPTS = [[1, 7, 9, 12, 2], [5], [3, 3, 8, 20, 11, 4, 6]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    convert(tiny_llama.write(folder / "hf"), folder / "ckpt")
    return str(folder / "ckpt")


@pytest.mark.parametrize(
    "degrees, temperature", [(dict(data=2, tensor=4, kv_heads=2), 0.0), (dict(context=4, tensor=2), 0.8)], ids=str
)
def test_two_processes_generate_what_one_does(checkpoint, degrees, temperature):
    job = dict(path=checkpoint, prompts=PROMPTS, new=10, temperature=temperature)
    alone = workers.texts(**job, degrees={})
    assert alone[0] == alone[1] and all(len(row) == 10 for row in alone[0])
    for index, result in enumerate(run(workers.texts, {**job, "degrees": degrees})):
        assert result == alone, f"process {index}"
