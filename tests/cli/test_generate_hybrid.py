"""generate with a Qwen3.5 from the command line: converted from its folder, on meshes, with layers in host memory."""

import json

import pytest
import tiny_llama
import torch
import transformers
from command_line import invoke
from torch_qwen3_5 import CASES, harsh
from torch_values import arrays

from shardzoo.zoo import layout

SIZES = {**CASES["published-pattern"], "vocab_size": len(tiny_llama.WORDS)}
PROMPTS = ("--prompt", "word3 word4 word5 word6 word7", "--prompt", "word9")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, eos_token_id=0)).eval()
    harsh(model)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("hybrid")
    source = tiny_llama.write(folder / "source", arrays(model), **model.config.to_dict())
    assert invoke("convert", source, folder / "ckpt").status == 0
    return folder / "ckpt"


def replies(*arguments):
    ended = invoke("generate", *arguments, "--max-new-tokens", 10, "--json")
    assert ended.status == 0, ended.err
    return [reply["text"].split() for reply in json.loads(ended.out)["replies"]]


def test_the_reply_is_that_of_transformers(model, checkpoint):
    for text, reply in zip(PROMPTS[1::2], replies(checkpoint, *PROMPTS, "--raw"), strict=True):
        ids = torch.tensor([[tiny_llama.WORDS.index(word) for word in text.split()]])
        want = model.generate(input_ids=ids, max_new_tokens=10, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        ends = want.tolist().index(0) if 0 in want else len(want)
        assert reply == [tiny_llama.WORDS[i] for i in want[:ends]]


def test_meshes_and_host_memory(checkpoint, monkeypatch):
    want = replies(checkpoint, *PROMPTS)
    assert replies(checkpoint, *PROMPTS, "--mesh", "context=2,tensor=2") == want
    keep = layout.keep_on_host
    monkeypatch.setattr(layout, "keep_on_host", lambda declared: keep(declared, smallest=16))
    assert replies(checkpoint, *PROMPTS, "--offload") == want
