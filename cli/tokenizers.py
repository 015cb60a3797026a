"""The tokenizers that came with a pipeline, as `zoo.pipelines` uses them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from shardzoo.checkpoints.pipeline import Pipeline
from shardzoo.cli import chat
from shardzoo.errors import InputError
from shardzoo.strict_json import parse_object

DESCRIBED, VOCABULARY, MERGES, SETTINGS = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"
PAD = "<pad>"  # where the settings do not name it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenizer of a pipeline's folder.

    Attributes:
        text: the tokenizer itself with its chat template.
        pad: the token that fills up rows, as text.
        pads_left: whether it does so before the text.
        origin: where it is from.
    """

    text: chat.Text
    pad: str
    pads_left: bool
    origin: str

    def padding(self) -> tuple[int, bool]:
        """The token that fills up rows, and whether it does so before the text.

        Raises:
            InputError: there is none.
        """
        found = self.text.tokenizer.token_to_id(self.pad)
        if found is None:
            raise InputError(f"{self.origin}: this tokenizer has no token for padding: convert again")
        return found, self.pads_left

    def encode(self, text: str, *, limit: int, special: bool = True) -> list[int]:
        """Ids of a text, at most `limit`, with the special tokens that the tokenizer puts round it if `special`."""
        self.text.tokenizer.enable_truncation(limit)
        return self.text.tokenizer.encode(text, add_special_tokens=special).ids

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A chat as text, by the chat template."""
        return self.text.render(messages, **options)


def read_tokenizer(pipeline: Pipeline, name: str) -> Tokens:
    """The tokenizer in the folder called `name`, or the only one that there is.

    Raises:
        InputError: there is none, or it cannot be used; the packages of the extra `text` are missing.
    """
    chat.need_packages("tokenizers", "jinja2")
    folder = _folder(pipeline, name)
    found = {PurePosixPath(path).name: path for path in pipeline.files if PurePosixPath(path).parent == folder}
    read = {file: pipeline.read(path) for file, path in found.items()}  # each held against its digest
    settings = _object(pipeline, found, read, SETTINGS) if SETTINGS in read else {}
    if DESCRIBED in read:
        described = _object(pipeline, found, read, DESCRIBED)
    else:
        described = _described(_object(pipeline, found, read, VOCABULARY), read[MERGES].decode(), settings, str(folder))
    origin = f"{pipeline.path}: {folder}"
    tokenizer = chat.make_tokenizer(described, origin)
    tokenizer.no_padding()
    assets = {file: pipeline.file(path) for file, path in found.items()}
    text = chat.with_tokenizer(tokenizer, assets, origin)
    own = described.get("padding") or {}  # what tokenizer.json says, where the settings say nothing
    pad = text.special.get("pad_token", own.get("pad_token", PAD))
    side = str(settings.get("padding_side") or own.get("direction", "right"))
    return Tokens(text=text, pad=pad, pads_left=side.lower() == "left", origin=origin)


def _folder(pipeline: Pipeline, name: str) -> PurePosixPath:
    files = {PurePosixPath(path) for path in pipeline.files}
    found = {path.parent for path in files if path.name == DESCRIBED}
    found |= {p.parent for p in files if p.name == VOCABULARY and p.with_name(MERGES) in files}
    named = [folder for folder in found if folder.name == name]
    if not named and pipeline.layout == "original":  # which have one tokenizer, in a folder of its own name
        named = list(found)
    if len(named) == 1:
        return named[0]
    several = f"{len(named)} tokenizers" if named else "no tokenizer"
    raise InputError(
        f"{pipeline.path}: {several} ({DESCRIBED}, or {VOCABULARY} and {MERGES}) in a folder {name!r} among its files"
        f" ({', '.join(pipeline.files) or 'none'}): convert again from a folder that holds the tokenizer"
    )


def _object(pipeline: Pipeline, found: Mapping[str, str], read: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_object(read[name], str(pipeline.file(found[name])))


# How texts are cut into pieces by the tokenizers that are published as a vocabulary and merges.
_CLIP_PIECES = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _described(vocabulary: Mapping[str, int], merges: str, settings: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """What tokenizer.json would say of a tokenizer that came as a vocabulary and merges.

    Raises:
        InputError: it is of another kind than CLIP's or Qwen's.
    """
    import tokenizers

    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if kind not in _MAKERS:
        known = " and ".join(_MAKERS)
        raise InputError(f"{folder}: of {kind!r} only {DESCRIBED} is read, and without it {known}: add {DESCRIBED}")
    lines = [line.partition(" ") for line in merges.splitlines() if line and not line.startswith("#version")]
    made = _MAKERS[kind](dict(vocabulary), [(one, other) for one, _, other in lines], settings)
    added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for _, token in added:
        flags = {name: token[name] for name in _FLAGS if name in token}
        made.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
    return json.loads(made.to_str())


def _clip(vocabulary: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]) -> Any:
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    start = chat.token_text(settings.get("bos_token", "<|startoftext|>"))
    end = chat.token_text(settings.get("eos_token", "<|endoftext|>"))
    named = {"continuing_subword_prefix": "", "end_of_word_suffix": "</w>", "unk_token": end}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, **named))
    spaces = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    cut = pre_tokenizers.Split(tokenizers.Regex(_CLIP_PIECES), "removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ends = ((end, vocabulary[end]), (start, vocabulary[start]))
    made.post_processor = processors.RobertaProcessing(*ends, trim_offsets=False, add_prefix_space=False)
    return made


def _qwen(vocabulary: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]) -> Any:
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers

    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(tokenizers.Regex(_QWEN_PIECES), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    return made


_MAKERS = {"CLIPTokenizer": _clip, "Qwen2Tokenizer": _qwen}
