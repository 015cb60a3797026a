"""SmolLM2 as a Hugging Face folder, with transformers, which reads the same GGUF file by itself, as the check; and what
the demo makes of commands that do not end as they must.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from smollm2 import EXAMPLES, example
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


@pytest.fixture
def demo():
    return example("demo")


def test_demo_shows_output_time_and_peak_memory_of_a_command():
    """In a small process, as the demo is: the peak of a started process counts what the starting one holds."""
    code = f"""
import runpy, sys
run = runpy.run_path({str(EXAMPLES / "demo.py")!r})["run"]
step = run([sys.executable, "-c", "print('x' * 10); b = bytearray(200 << 20)"], "make bytes")
assert step.output == "x" * 10 + chr(10) and 200 < step.peak_mib < 250 and step.seconds > 0, step
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("\n$ make bytes\nxxxxxxxxxx\n  [") and "s, peak 2" in done.stdout


def test_demo_stops_at_another_exit_status(demo):
    program = [sys.executable, "-c", "raise SystemExit(3)"]
    assert demo.run(program, "ends with 3", status=3).output == ""
    with pytest.raises(SystemExit, match="exit status 3, expected 0"):
        demo.run(program, "ends with 3")


def test_demo_stops_at_a_reply_that_differs(demo, monkeypatch, tmp_path):
    texts = iter(["a\n", "a\n", "b\n"])
    monkeypatch.setattr(demo, "shardzoo", lambda *_: demo.Step("generate", 1.0, 1.0, next(texts)))
    with pytest.raises(SystemExit, match="do not give the same text"):
        demo.restore_and_generate(tmp_path)


def test_demo_compares_folders_bit_for_bit(demo, tmp_path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        (folder / "a").write_bytes(bytes(1000))
        (folder / "b").write_bytes(b"x")
    demo.compare(before, after)
    assert "All 2 files" in capsys.readouterr().out
    (after / "a").write_bytes(bytes(999) + b"\1")
    with pytest.raises(SystemExit, match="a did not come back"):
        demo.compare(before, after)
    (after / "a").unlink()
    with pytest.raises(SystemExit, match="holds"):
        demo.compare(before, after)
