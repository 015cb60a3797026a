"""Tokenizers and chat templates as checkpoints carry them, in their several layouts."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shardzoo.cli.chat import read_text_assets
from shardzoo.errors import InputError

WORDS = ["<s>", "</s>", "<|user|>", "<|reply|>", "hello", "world", "be", "kind"]
TEMPLATE = """{%- for message in messages %}
    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|user|> ' + message['content'] + ' ' + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %} <|reply|>{% endif %}"""


def tokenizer() -> Tokenizer:
    result = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    result.add_special_tokens(["<s>", "</s>"])
    return result


@pytest.fixture
def assets(tmp_path: Path):
    """Writes files and gives them by name, with the tokenizer among them."""

    def write(**files) -> dict[str, Path]:
        named = {"tokenizer.json": tokenizer().to_str(), **{name.replace("__", "."): v for name, v in files.items()}}
        for name, content in named.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return {name: tmp_path / name for name in named}

    return write


SETTINGS = {"eos_token": "</s>", "bos_token": {"content": "<s>", "lstrip": False}, "pad_token": None}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {**SETTINGS, "chat_template": TEMPLATE}},
        {"tokenizer_config__json": SETTINGS, "chat_template__jinja": TEMPLATE},
        {"tokenizer_config__json": SETTINGS, "chat_template__json": {"chat_template": TEMPLATE}},
        {
            "tokenizer_config__json": {
                **SETTINGS,
                "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}],
            }
        },
        {"tokenizer_config__json": {**SETTINGS, "chat_template": "the old one"}, "chat_template__jinja": TEMPLATE},
    ],
    ids=["settings", "jinja file", "json file", "list", "jinja file first"],
)
def test_chat_templates(files, assets):
    text = read_text_assets(assets(**files), "ckpt")
    rendered = "<|user|> be kind </s><|user|> hello </s> <|reply|>"
    assert text.render([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]) == rendered
    # The template wrote what it wanted: nothing is put before it.
    assert text.encode_chat("hello") == [WORDS.index(word) for word in ("<|user|>", "hello", "</s>", "<|reply|>")]
    assert text.encode("hello world") == [0, 4, 5]
    assert text.decode([0, 4, 5, 1]) == "hello world"


@pytest.mark.parametrize(
    ("files", "end_ids"),
    [
        ({"generation_config__json": {"eos_token_id": [1, 3]}, "config__json": {"eos_token_id": 2}}, (1, 3)),
        ({"generation_config__json": {}, "config__json": {"eos_token_id": 2}}, (2,)),
        ({"tokenizer_config__json": SETTINGS}, (1,)),
        ({}, ()),
    ],
)
def test_end_tokens(files, end_ids, assets):
    assert read_text_assets(assets(**files), "ckpt").end_ids == end_ids


def test_without_a_template_raw_is_named(assets):
    text = read_text_assets(assets(), "ckpt")
    with pytest.raises(InputError, match="no chat template: use --raw"):
        text.encode_chat("hello")


def test_a_template_that_refuses_is_quoted(assets):
    text = read_text_assets(assets(tokenizer_config__json={**SETTINGS, "chat_template": TEMPLATE}), "ckpt")
    with pytest.raises(InputError, match="no tools"):
        text.render([{"role": "tool", "content": "x"}])


def test_a_template_cannot_reach_python(assets):
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    text = read_text_assets(assets(chat_template__jinja=evil), "ckpt")
    with pytest.raises(InputError, match="refuses these messages"):
        text.encode_chat("hello")


def test_a_missing_tokenizer_is_named_with_what_is_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"ckpt: no tokenizer.json among the files it carries \(config.json\)"):
        read_text_assets({"config.json": tmp_path / "config.json"}, "ckpt")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", b"{broken", "is not JSON"),
        ("tokenizer_config.json", b"[1]", "holds a list"),
        ("generation_config.json", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
        ("tokenizer.json", b"{}", "has no model"),
        ("tokenizer.json", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(name, content, problem, assets):
    files = assets(**{name.replace(".", "__"): ""})
    files[name].write_bytes(content)
    with pytest.raises(InputError, match=f"ckpt: {name} {problem}"):
        read_text_assets(files, "ckpt")


def test_missing_packages_are_named_with_the_extra(assets, monkeypatch):
    files = assets()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"tokenizers and jinja2: pip install 'shardzoo\[text\]'"):
        read_text_assets(files, "ckpt")
