"""Text to token ids and back, by the tokenizer and the chat template that came with a checkpoint."""

import dataclasses
import datetime
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shardzoo.errors import InputError

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Tokenizer, chat template and end tokens of one checkpoint.

    Attributes:
        tokenizer: a `tokenizers.Tokenizer`.
        template: Jinja source of the chat template, None when the checkpoint has none.
        special: name ("bos_token") to text of the special tokens that templates may use.
        end_ids: token ids that end a reply.
    """

    tokenizer: Any
    template: str | None
    special: Mapping[str, str]
    end_ids: tuple[int, ...]

    def encode(self, prompt: str) -> list[int]:
        """Ids of a bare text, with the special tokens that the tokenizer itself puts round it."""
        return self.tokenizer.encode(prompt).ids

    def encode_chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Ids of a chat of one user message, up to where the reply begins.

        Raises:
            InputError: the checkpoint has no chat template, or the template refuses the messages.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        text = self.render([*messages, {"role": "user", "content": prompt}])
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat as text, with the opening of the reply at its end; `options` are what else the template reads."""
        import jinja2

        if self.template is None:
            raise InputError("generate: this checkpoint has no chat template: use --raw to continue a bare text")
        try:
            template = _environment().from_string(self.template)
            return template.render({"messages": messages, "add_generation_prompt": True, **self.special, **options})
        except jinja2.TemplateError as error:
            raise InputError(f"generate: the chat template refuses these messages ({error}): use --raw") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def make_tokenizer(described: Mapping[str, Any], origin: str) -> Any:
    """The `tokenizers.Tokenizer` that a tokenizer.json describes.

    Raises:
        InputError: it describes none.
    """
    import tokenizers

    if not isinstance(described.get("model"), dict):
        raise InputError(f"{origin}: tokenizer.json has no model: convert again from a whole folder")
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises no narrower one
        raise InputError(
            f"{origin}: tokenizer.json cannot be used ({error}): convert again from a whole folder"
        ) from error


def read_text_assets(assets: Mapping[str, Path], origin: str) -> Text:
    """The text side of a checkpoint from the files it carries.

    Raises:
        InputError: no tokenizer.json among them; a file that is not JSON; the packages of the extra `text` are missing.
    """
    need_packages("tokenizers", "jinja2")
    files = {PurePosixPath(name).name: path for name, path in assets.items()}
    if "tokenizer.json" not in files:
        raise InputError(
            f"{origin}: no tokenizer.json among the files it carries ({', '.join(sorted(files)) or 'none'}):"
            " convert again from a folder that holds tokenizer.json beside the weights"
        )
    return with_tokenizer(make_tokenizer(_json(files, "tokenizer.json", origin), origin), files, origin)


def with_tokenizer(tokenizer: Any, files: Mapping[str, Path], origin: str) -> Text:
    """A tokenizer, with what the files beside it say of templates and special tokens.

    Raises:
        InputError: a file that is not JSON.
    """
    settings = _json(files, "tokenizer_config.json", origin)
    special = {name: token_text(settings[name]) for name in SPECIAL if settings.get(name) is not None}
    template = _template(files, settings, origin)
    end_ids = _end_ids(files, special, tokenizer, origin)
    return Text(tokenizer=tokenizer, template=template, special=special, end_ids=end_ids)


def need_packages(*names: str) -> None:
    """Refuses to start without packages of the extra `text`.

    Raises:
        InputError: what to install.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"generate needs {' and '.join(missing)}: pip install 'shardzoo[text]'")


def _json(files: Mapping[str, Path], name: str, origin: str) -> dict[str, Any]:
    if name not in files:
        return {}
    text = _text(files, name, origin)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{origin}: {name} is not JSON ({error}): convert again from a whole folder") from error
    if not isinstance(found, dict):
        raise InputError(f"{origin}: {name} holds a {type(found).__name__}, not an object: convert again")
    return found


def _text(files: Mapping[str, Path], name: str, origin: str) -> str:
    try:
        return files[name].read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{origin}: {name} is not UTF-8 ({error}): convert again from a whole folder") from error


def token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template(files: Mapping[str, Path], settings: Mapping[str, Any], origin: str) -> str | None:
    """The template in a file of its own, as newer folders have it, before the one in the tokenizer's settings."""
    if "chat_template.jinja" in files:
        return _text(files, "chat_template.jinja", origin)
    found = _json(files, "chat_template.json", origin).get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _end_ids(files: Mapping[str, Path], special: Mapping[str, str], tokenizer: Any, origin: str) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _json(files, name, origin).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    found = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if found is None else (found,)


def _environment():
    """Jinja as chat templates expect it, unable to reach anything but the messages."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment
