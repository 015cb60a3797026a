"""Which files of a folder are the weights: an index where there is one, else a set of files that leaves no doubt."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shardzoo.convert.names import batched_names, name_problem, shown
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import parse_object

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Twins that hold the same tensors in another precision or average, named `<stem>.<variant>.<suffix>`.
VARIANTS = (
    "fp16",
    "bf16",
    "fp32",
    "fp8",
    "fp8_e4m3fn",
    "fp8_e5m2",
    "int8",
    "ema",
    "ema_only",
    "non_ema",
    "non-ema",
)
# What training scripts leave beside the weights under the same suffixes.
_NOT_WEIGHTS = re.compile(
    r"training_args|optimizer|optim_states|scheduler|scaler|rng_state|random_states|trainer_state"
)
_WEIGHTS = re.compile(
    rf"(?P<stem>.+?)(?:\.(?P<variant>{'|'.join(VARIANTS)}))?(?:-(?P<part>\d+)-of-(?P<parts>\d+))?"
    r"(?P<suffix>\.safetensors|\.bin|\.pt|\.pth|\.ckpt)"
)
_INDEX = re.compile(r".+?(?P<suffix>\.safetensors|\.bin|\.pt|\.pth|\.ckpt)?\.index(?:\.(?P<variant>[\w-]+))?\.json")
GGUF_REMEDY = "give the safetensors files that it was made from, or convert it to safetensors first"
MAX_JSON_BYTES = 200 << 20
# Small files that belong to a model and travel with its weights.
EXTRAS = (
    "tokenizer*",
    "vocab*",
    "merges*.txt",
    "*.tiktoken",
    "*.spm",
    "spiece*.model",
    "sentencepiece*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "scheduler_config.json",
    "params.json",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True, kw_only=True)
class Index:
    """A weight index: which tensor lies in which file. `text` is the file as it stands."""

    path: Path
    text: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]

    @property
    def shards(self) -> list[str]:
        """File names in order of first mention."""
        return list(dict.fromkeys(self.weight_map.values()))


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files to read (paths relative to `root`), their index if they have one, and remarks for the user."""

    root: Path
    files: tuple[str, ...]
    index: Index | None = None
    variant: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def safetensors(self) -> bool:
        return all(name.endswith(".safetensors") for name in self.files)

    @property
    def name(self) -> str:
        """What to pass instead of the folder to get these files."""
        return self.index.path.name if self.index else self.files[0]


def read_text(path: Path) -> str:
    """A small text file in UTF-8."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(
                f"{path}: size={path.stat().st_size} exceeds {MAX_JSON_BYTES}: this is no JSON of a checkpoint"
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 (byte {error.start}): the file is damaged") from None


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """A config.json: its text as it stands, and the object in it."""
    text = read_text(path)
    return text, parse_object(text.encode(), str(path))


def read_index(path: Path) -> Index:
    """Reads and checks a weight index.

    Raises:
        InputError: no `weight_map` of strings, a tensor listed twice, or a file name that leaves the folder.
    """
    text = read_text(path)
    content = parse_object(text.encode(), str(path))
    weight_map, metadata = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: holds no weight_map of tensor names to files: this is no index of weights")
    if not isinstance(metadata, dict):
        raise InputError(f"{path}: metadata is a {type(metadata).__name__}, not an object")
    fail_if(_map_problems(weight_map), f"{path}: weight_map is not sound")
    weight_map = {key: str(PurePosixPath(name)) for key, name in weight_map.items()}  # "./file" is "file"
    return Index(path=path, text=text, weight_map=weight_map, metadata=metadata)


def _map_problems(weight_map: Mapping[str, object]) -> list[str]:
    wrong = [f"{shown(key)!r}: is given no file name" for key, name in weight_map.items() if not isinstance(name, str)]
    wrong += [problem for key in weight_map if (problem := name_problem(key))]
    names = {name for name in weight_map.values() if isinstance(name, str)}
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name:
            wrong.append(f"file {shown(name)!r} lies outside the folder")
        elif len(name.encode(errors="replace")) > 255 or not name.isprintable():
            wrong.append(f"file {shown(name)!r} has a name that no file has")
    return wrong[:40]


def find_weights(path: Path, variant: str | None = None) -> WeightFiles:
    """The weight files that `path` (a file, an index, or a folder) stands for.

    `variant` picks a twin such as "fp16"; by default the files without one are read, and safetensors before `.bin`.

    Raises:
        InputError: nothing there, or several candidates; the message names what to pass.
    """
    if os.path.isdir(path):
        return choose_weights(path, _names(path), variant)
    if not os.path.exists(path):
        link = " (a link to a file that is gone)" if os.path.islink(path) else ""
        raise InputError(f"{path}: does not exist{link}: give a folder, a weight file or an index of weights")
    if path.suffix == ".json":
        return _of_index(read_index(path))
    match = _WEIGHTS.fullmatch(path.name)
    if match and match["part"] and int(match["parts"]) > 1:
        raise InputError(
            f"{path}: is part {int(match['part'])} of {int(match['parts'])}: give the folder {path.parent} or its index"
        )
    return WeightFiles(root=path.parent, files=(path.name,), variant=(match and match["variant"]) or "")


def _of_index(index: Index) -> WeightFiles:
    match = _INDEX.fullmatch(index.path.name)
    return WeightFiles(
        root=index.path.parent,
        files=tuple(index.shards),
        index=index,
        variant=(match and match["variant"]) or "",
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from None


def is_index(name: str) -> bool:
    """Whether this is the name of an index of weights."""
    return _INDEX.fullmatch(name) is not None and not name.startswith(".")


def is_weights(name: str) -> bool:
    """Whether this is the name of a file of weights, and not of an optimizer or the like."""
    return _WEIGHTS.fullmatch(name) is not None and not name.startswith(".") and not _NOT_WEIGHTS.search(name)


def choose_weights(folder: Path, names: Iterable[str], variant: str | None = None) -> WeightFiles:
    """The weight files among the file `names` of a folder; only the indexes among them are read.

    Raises:
        InputError: none, or several sets that could be meant.
    """
    names = list(names)
    return _choose(folder, names, _candidates(folder, names), variant)


def _is_of_weights(path: Path) -> bool:
    """Whether an index is one of weights: by its name, or by its content where the name does not say."""
    match = _INDEX.fullmatch(path.name)
    if match and match["suffix"]:
        return True
    try:
        return "weight_map" in parse_object(read_text(path).encode(), str(path))
    except InputError:  # not JSON, so an index of something else
        return False


def _candidates(folder: Path, names: list[str]) -> list[WeightFiles]:
    """Every set of weight files in the folder: one an index, one a run of numbered parts, one a single file."""
    found = [_of_index(read_index(folder / name)) for name in names if is_index(name) and _is_of_weights(folder / name)]
    listed = {name for weights in found for name in weights.files}
    runs: dict[tuple[str, str, str, int], list[str]] = defaultdict(list)
    for name in names:
        match = _WEIGHTS.fullmatch(name)
        if match and is_weights(name) and name not in listed:
            parts = int(match["parts"] or 1)
            runs[(match["stem"], match["variant"] or "", match["suffix"], parts)].append(name)
    for (_, variant, _, _), files in runs.items():
        found.append(WeightFiles(root=folder, files=tuple(files), variant=variant))
    return found


def _choose(folder: Path, names: list[str], found: list[WeightFiles], variant: str | None) -> WeightFiles:
    if not found:
        _refuse_gguf(folder, names)
        raise InputError(f"{folder}: holds no weights{_hint_of_subfolders(folder)}")
    kept = _of_variant(folder, found, variant)
    kept = [weights for weights in kept if weights.safetensors] or kept
    kept = [weights for weights in kept if weights.index] or kept
    if len(kept) > 1:
        raise InputError(
            f"{folder}: holds {len(kept)} sets of weights and no index that joins them: give one of them, "
            + ", ".join(str(folder / weights.name) for weights in kept)
        )
    chosen = kept[0]
    _check_run(folder, chosen)
    unread = sorted({name for weights in found for name in weights.files} - set(chosen.files))
    present = [name for name in unread if name in names]
    stray = _strays_of_index(chosen, present)
    fail_if(stray, f"{folder}: {chosen.name} does not list every part")
    if present:
        chosen.notes.append(f"{folder}: not read beside {chosen.name}: {batched_names(present, 10)}")
    return chosen


def _refuse_gguf(folder: Path, names: Iterable[str]) -> None:
    """Says of a folder without weights which GGUF files it has.

    Raises:
        InputError: it has some.
    """
    found = [name for name in names if name.lower().endswith(".gguf")]
    if found:
        raise InputError(
            f"{folder}: holds no weights but {batched_names(found, 3)}, and GGUF is not read: {GGUF_REMEDY}"
        )


def _of_variant(folder: Path, found: list[WeightFiles], variant: str | None) -> list[WeightFiles]:
    names = sorted({weights.variant for weights in found})
    if variant is not None:
        kept = [weights for weights in found if weights.variant == variant]
        if not kept:
            raise InputError(f"{folder}: holds no variant {variant!r} (found: {', '.join(map(repr, names))})")
        return kept
    if len(names) > 1 and "" not in names:
        raise InputError(
            f"{folder}: holds the variants {', '.join(names)} and none without: choose one by variant= (--variant)"
        )
    return [weights for weights in found if weights.variant == names[0]]


def _check_run(folder: Path, chosen: WeightFiles) -> None:
    """Without an index, numbered parts must all be there."""
    match = _WEIGHTS.fullmatch(chosen.files[0])
    if chosen.index or not match or not match["parts"]:
        return
    parts = int(match["parts"])
    there = {int(part["part"]) for name in chosen.files if (part := _WEIGHTS.fullmatch(name))}
    missing = sorted(set(range(1, min(parts, 100_000) + 1)) - there)
    if missing:
        raise InputError(
            f"{folder}: {chosen.files[0]} is one of {parts} parts, {len(missing)} are missing"
            f" ({batched_names([str(part) for part in missing])}): fetch them"
        )


def _strays_of_index(chosen: WeightFiles, unread: Iterable[str]) -> list[str]:
    """Files numbered as parts of the chosen index's run which it does not list: the index is cut or of another run."""
    if not chosen.index:
        return []
    runs = {_run_of(name) for name in chosen.files} - {None}
    return [
        f"{name} is numbered as one of its parts, but not listed: fetch {chosen.name} again, or remove it"
        for name in unread
        if _run_of(name) in runs
    ]


def _run_of(name: str) -> tuple[str, ...] | None:
    match = _WEIGHTS.fullmatch(name)
    return (
        (match["stem"], match["variant"] or "", match["parts"], match["suffix"]) if match and match["parts"] else None
    )


def _hint_of_subfolders(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    inside = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    with_weights = [str(entry) for entry in inside if os.access(entry, os.R_OK) and any(map(is_weights, _names(entry)))]
    if with_weights:
        return f": give one of its folders that do, {batched_names(with_weights, 20)}"
    return f" (*.safetensors, {', '.join('*' + suffix for suffix in TORCH_SUFFIXES)}, or an index of them)"
