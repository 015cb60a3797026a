"""The examples of training, at sizes of seconds: they start, learn, stop, and go on on another mesh."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from command_line import invoke
from smollm2 import EXAMPLES, example
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def run(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[int, float]:
    """Step -> loss, as the example prints them."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    example(name).main()
    lines = re.findall(r"^step (\d+): loss ([\d.]+)", capsys.readouterr().out, re.M)
    return {int(step): float(loss) for step, loss in lines}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny decoder whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("finetune")
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    weights = {k: v * np.asarray(0.1, v.dtype) for k, v in tiny_llama.tensors(vocab_size=len(vocab)).items()}
    source = tiny_llama.write(folder / "source", weights, vocab_size=len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({}))
    assert invoke("convert", source, folder / "ckpt", "--dtype", "f32").status == 0
    return folder / "ckpt"


GIVEN = ("--rate", 0.02, "--length", 32, "--batch", 8)


def test_a_decoder_learns(checkpoint, tmp_path, capsys, monkeypatch):
    where = (checkpoint, tmp_path / "run", "--steps", 20, "--mesh", "data=2", "--fsdp")
    told = run("finetune_decoder", capsys, monkeypatch, *where, *GIVEN)
    assert list(told) == [10, 20] and 4 < told[10] < np.log(256) + 0.5 and told[20] < told[10] - 0.5


@pytest.mark.slow
def test_a_decoder_goes_on_on_another_mesh(checkpoint, tmp_path, capsys, monkeypatch):
    where = (checkpoint, tmp_path / "run")
    first = run(
        "finetune_decoder", capsys, monkeypatch, *where, *GIVEN, "--steps", 20, "--mesh", "data=2,tensor=2", "--fsdp"
    )
    more = run("finetune_decoder", capsys, monkeypatch, *where, *GIVEN, "--steps", 30, "--mesh", "context=2")
    assert list(first) == [10, 20] and list(more) == [30] and more[30] < first[20] + 0.1
    assert sorted(int(path.name) for path in (tmp_path / "run").iterdir() if path.name.isdigit()) == [20, 30]


def test_a_diffusion_transformer_learns(tmp_path, capsys, monkeypatch):
    given = (tmp_path / "run", "--steps", 20, "--mesh", "data=2", "--fsdp", "--batch", 8)
    told = run("train_diffusion", capsys, monkeypatch, *given)
    assert list(told) == [10, 20] and told[20] < told[10] and 0 < told[20] < 2


def test_examples_are_short():
    for name in ("finetune_decoder", "train_diffusion"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150
