"""generate from the command line: small models in this process, real weights as a user runs them."""

import json
from pathlib import Path

import jax
import pytest
import tiny_llama
from command_line import environment, invoke, run

from shardzoo import checkpoints, zoo
from shardzoo.zoo import layout
from shardzoo.zoo.generate import complete


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    source = tiny_llama.write(folder / "source")
    assert invoke("convert", source, folder / "ckpt", "--dtype", "f32").status == 0
    return folder / "ckpt"


def replies(*arguments: object, **options) -> list[dict]:
    ended = invoke("generate", *arguments, "--max-new-tokens", 12, "--json", **options)
    assert ended.status == 0, ended.err
    return json.loads(ended.out)["replies"]


def ids(text: str) -> list[int]:
    return [tiny_llama.WORDS.index(word) for word in text.split()]


def test_the_reply_is_that_of_the_library(checkpoint):
    """Chat template, end token and decoding are the command's; the tokens are those of `complete`."""
    mesh = zoo.make_mesh()
    model = checkpoints.restore(checkpoint, mesh)
    declared = zoo.decoder.declare(model.config)
    chat = ids("<user> word3 word4 <reply>")
    (expected,) = complete(declared, mesh, model, [chat], max_new_tokens=12, stop_ids=(0,))
    (reply,) = replies(checkpoint, "--prompt", "word3 word4")
    assert reply["prompt_tokens"] == len(chat) and reply["new_tokens"] == len(expected)
    # The tokenizer has no decoder of its own: it joins words with spaces, and leaves out special tokens.
    assert reply["text"].split() == [tiny_llama.WORDS[token] for token in expected]


def test_raw_text_has_no_template(checkpoint):
    (reply,) = replies(checkpoint, "--prompt", "word3 word4", "--raw")
    assert reply["prompt_tokens"] == 2


def test_a_system_message_comes_first(checkpoint):
    (reply,) = replies(checkpoint, "--prompt", "word3", "--system", "word5")
    assert reply["prompt_tokens"] == len(ids("<user> word5 <user> word3 <reply>"))


@pytest.mark.parametrize("mesh", ["context=2,tensor=4", "data=2,context=2", "pipe=2,tensor=2"])
def test_any_mesh_gives_the_same_replies(mesh, checkpoint):
    prompts = ("--prompt", "word3 word4 word5", "--prompt", "word9")
    assert replies(checkpoint, *prompts, "--mesh", mesh) == replies(checkpoint, *prompts)


def test_sampling_follows_the_seed(checkpoint):
    options = (checkpoint, "--prompt", "word3", "--temperature", 2.0, "--top-k", 20, "--top-p", 0.99)
    first = replies(*options, "--seed", 1)
    assert replies(*options, "--seed", 1) == first
    assert replies(*options, "--seed", 2) != first


def test_the_prompt_may_come_from_standard_input(checkpoint):
    assert replies(checkpoint, text="word3 word4\n") == replies(checkpoint, "--prompt", "word3 word4")
    ended = invoke("generate", checkpoint, text="  \n")
    assert ended.status == 1 and "no prompt" in ended.err


def test_text_is_all_that_standard_output_has(checkpoint):
    (expected,) = replies(checkpoint, "--prompt", "word3")
    ended = invoke("generate", checkpoint, "--prompt", "word3", "--max-new-tokens", 12)
    assert ended == type(ended)(0, expected["text"] + "\n", "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--mesh", "tensor=3"), ("heads=4 does not divide by 3", "kv_heads=2", "tensor degrees that fit: 1, 2, 4")),
        (("--mesh", "context=16"), ("needs 16 devices", "has 8")),
        (("--mesh", "pipe=4"), ("layer=2 does not divide by 4",)),
        (("--max-new-tokens", "1000"), ("max_new_tokens=1000", "max_positions=128")),
        (("--dtype", "float8_e4m3fn"), ("float8_e4m3fn is for storage",)),
        (("--top-p", "0"), ("top_p=0.0 is not in (0, 1]",)),
        (("--top-k", "5", "--top-p", "0.5"), ("--top-k does nothing at --temperature 0", "--top-p does nothing at")),
        (("--raw", "--system", "word5"), ("--system is for the chat template, which --raw leaves out",)),
    ],
)
def test_what_cannot_be_done_is_named_before_a_weight_is_read(words, named, checkpoint, monkeypatch):
    def read(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoints, "restore", read)
    ended = invoke("generate", checkpoint, "--prompt", "word3", "--max-new-tokens", 8, *words)
    assert ended.status == 1 and ended.out == "" and ended.err.startswith("error: ")
    for part in named:
        assert part in ended.err


def test_a_device_without_the_memory_is_named(checkpoint, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nAnd more.")

    monkeypatch.setattr(checkpoints, "restore", full)
    ended = invoke("generate", checkpoint, "--prompt", "word3", "--max-new-tokens", 8, "--mesh", "tensor=2")
    assert ended.status == 1
    assert "mesh (tensor=2) has too little memory (RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.)" in ended.err


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    source = tiny_llama.write(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    assert invoke("convert", source, tmp_path / "ckpt").status == 0
    ended = invoke("generate", tmp_path / "ckpt", "--prompt", "word3")
    assert ended.status == 1 and "no tokenizer.json" in ended.err


def test_a_user_s_process_makes_the_devices_that_the_mesh_needs(checkpoint):
    """Nothing set but the platform: the command itself asks for four CPU devices."""
    words = ("generate", checkpoint, "--prompt", "word3 word4", "--max-new-tokens", 12, "--json")
    ended = run(*words, "--mesh", "context=2,tensor=2")
    assert ended.status == 0 and ended.err == "", ended.err
    assert json.loads(ended.out)["replies"] == replies(checkpoint, "--prompt", "word3 word4")
    one = environment(XLA_FLAGS="--xla_force_host_platform_device_count=1")
    ended = run(*words, "--mesh", "tensor=2", env=one)
    assert ended.status == 1 and "needs 2 devices" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("mesh", ["one", "context=2,tensor=2"])
def test_blocks_in_host_memory_give_the_same_replies(mesh, checkpoint, monkeypatch):
    prompts = ("--prompt", "word3 word4 word5", "--prompt", "word9", "--mesh", mesh)
    want = replies(checkpoint, *prompts)
    kept, keep = [], layout.keep_on_host

    def small(declared):
        kept.append(keep(declared, smallest=16))
        return kept[-1]

    monkeypatch.setattr(layout, "keep_on_host", small)
    assert replies(checkpoint, *prompts, "--offload") == want
    assert kept[0].blocks.attn.q.weight.memory == "host"
