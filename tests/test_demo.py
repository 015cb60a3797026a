"""SmolLM2 as a Hugging Face folder: transformers, which reads the same GGUF file by itself, is the check."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from smollm2 import example
from tokenizers import Tokenizer

script = example("smollm2")
GGUF = script.gguf_file()
CHAT = [
    {"role": "system", "content": "You answer in rhyme."},
    {"role": "user", "content": "What is 12 x 12?"},
    {"role": "assistant", "content": "144"},
    {"role": "user", "content": "And  why?\n"},
]
TEXTS = [
    "Hello, world!",
    "The  quick brown\n\n fox isn't 12,345.67 far",
    "naïve café, 東京, Ελλάδα, 🙂 and \t tabs",
    "def f(x):\n    return x + 1\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def of_gguf():
    """The model as transformers reads it from the GGUF file."""
    return transformers.AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer_of_gguf():
    return transformers.AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name)


def test_weights_are_those_that_transformers_reads_bit_for_bit(smollm2_folder, of_gguf):
    ours = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    expected, found = of_gguf.state_dict(), ours.state_dict()
    assert list(expected) == list(found)
    different = [k for k in expected if not torch.equal(expected[k].view(torch.int32), found[k].view(torch.int32))]
    assert different == []
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_config_is_the_one_that_transformers_reads(smollm2_folder, of_gguf):
    expected = of_gguf.config.to_dict()
    found = transformers.AutoConfig.from_pretrained(smollm2_folder).to_dict()
    assert np.float32(found.pop("rms_norm_eps")) == np.float32(expected.pop("rms_norm_eps"))
    of_origin = {"_model_name_or_path", "_name_or_path", "quantization_config", "architectures", "unk_token_id"}
    assert {k: v for k, v in found.items() if k not in of_origin} == {
        k: v for k, v in expected.items() if k not in of_origin
    }


def test_folder_is_ordinary(smollm2_folder: Path):
    index = json.loads((smollm2_folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sizes = [(smollm2_folder / name).stat().st_size for name in files]
    assert 0.9 < sizes[0] / sizes[1] < 1.1
    assert "lm_head.weight" not in index["weight_map"]
    assert 0 <= sum(sizes) - index["metadata"]["total_size"] < 100_000


def test_tokenizer_differs_from_transformers_in_the_digit_rule_alone(smollm2_folder, tokenizer_of_gguf):
    expected = json.loads(tokenizer_of_gguf.backend_tokenizer.to_str())
    found = json.loads((smollm2_folder / "tokenizer.json").read_text())
    assert {part for part in expected if expected[part] != found[part]} == {"pre_tokenizer", "post_processor"}
    # Theirs adds nothing to a text; ours is none.
    assert expected["post_processor"]["special_tokens"] == {}
    digits, rest = found["pre_tokenizer"]["pretokenizers"]
    assert rest == expected["pre_tokenizer"]
    assert digits == {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_same_tokens(text, smollm2_folder, tokenizer_of_gguf):
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == tokenizer_of_gguf(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_spaces_before_a_digit_stay_together(smollm2_folder):
    """The file's pre-tokenizer is "smollm", which takes digits apart before anything else."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.encode("x   12").tokens == ["x", "ĠĠĠ", "1", "2"]


def test_chat_template_gives_the_text_of_transformers(smollm2_folder, tokenizer_of_gguf):
    from shardzoo.cli.chat import read_text_assets

    text = read_text_assets({path.name: path for path in smollm2_folder.iterdir()}, str(smollm2_folder))
    for chat in (CHAT, CHAT[1:2]):
        expected = tokenizer_of_gguf.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text.render(chat) == expected
    assert text.end_ids == (tokenizer_of_gguf.eos_token_id,)
    assert text.decode(text.encode_chat("Hi", "Be kind.")) == "system\nBe kind.\nuser\nHi\nassistant\n"


def test_unpermute_undoes_the_interleaving():
    heads, half, embed = 3, 4, 5
    rows = np.arange(heads * 2 * half * embed, dtype=np.float32).reshape(-1, embed)
    interleaved = rows.reshape(heads, 2, half, embed).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(interleaved, rows)
    np.testing.assert_array_equal(script.unpermute(interleaved, heads), rows)
