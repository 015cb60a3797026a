"""Fetches the weights of a Hugging Face repository: those of one format, the config, and the tokenizer.

Of a pipeline of diffusers, the same of every component.

`hf://owner/name[@revision][/folder]`. The environment variables of `huggingface_hub` hold (HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE).
"""

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardzoo.convert.folder import EXTRAS, choose_weights, is_index, is_weights
from shardzoo.convert.model_index import MODEL_INDEX, read_model_index
from shardzoo.errors import InputError

_ADDRESS = re.compile(
    r"hf:/{1,2}(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@]+))?(?:/(?P<folder>[^@]*?))?/*"
)
INSTALL = "pip install 'shardzoo[hub]'"


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """A repository, optionally at a revision (branch, tag or commit), optionally one of its folders."""

    repo: str
    revision: str | None
    folder: str

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{revision}{'/' + self.folder if self.folder else ''}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where files of the hub are from: "owner/name", the commit, and the folder in it ("" for the top)."""

    repo: str
    commit: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A repository's files on this machine: `folder` to open, and where they are from."""

    folder: Path
    origin: Origin


def is_hub_address(text: str) -> bool:
    """Whether this names a repository on the hub (a `Path` made of one has lost a slash)."""
    return text.startswith("hf:/")


def parse_address(text: str) -> HubAddress:
    """Takes `hf://owner/name[@revision][/folder]` apart."""
    match = _ADDRESS.fullmatch(text)
    if not match or ".." in text:
        raise InputError(f"{text}: is no address of the form hf://owner/name[@revision][/folder]")
    revision = match["revision"]
    return HubAddress(
        repo=match["repo"], revision=revision.replace("%2F", "/") if revision else None, folder=match["folder"] or ""
    )


def fetch(text: str, *, variant: str | None = None) -> Fetched:
    """Downloads what is needed to open a repository (what is already in the hub's cache is not fetched again).

    Raises:
        InputError: `huggingface_hub` is not installed, or the repository cannot be had; the message says why.
    """
    address = parse_address(text)
    return _fetch(_library(address), address, variant)


def fetch_pipeline(text: str, *, variant: str | None = None) -> Fetched | None:
    """Downloads the components that a `model_index.json` names, or nothing where there is none: None.

    Raises:
        InputError: as `fetch` and `read_model_index`.
    """
    address = parse_address(text)
    hub = _library(address)
    listed = _list(hub, address)
    if isinstance(listed, Fetched):
        return listed if (listed.folder / MODEL_INDEX).is_file() else None
    if MODEL_INDEX not in _names_in(listed.prefix, listed.paths):
        return None

    def inside_of(name: str) -> list[str]:
        return _names_in(f"{listed.prefix}{name}/", listed.paths)

    def has_weights(name: str) -> bool:
        return any(is_weights(one) or is_index(one) for one in inside_of(name))

    named = read_model_index(listed.download([MODEL_INDEX]) / MODEL_INDEX, has_weights).classes
    wanted = [MODEL_INDEX]
    for name in named:
        inside, weights = inside_of(name), has_weights(name)
        small = [one for one in inside if not weights or _is_small(one)]
        chosen = _choose(address, listed, small, inside, variant, name) if weights else []
        wanted += [f"{name}/{one}" for one in (*small, *chosen)]
    return _fetched(listed.download(wanted), address, listed.commit)


def _library(address: HubAddress) -> Any:
    try:
        import huggingface_hub.errors
    except ImportError:
        raise InputError(f"{address}: reading from the hub needs huggingface_hub: {INSTALL}") from None
    return huggingface_hub


@dataclass(frozen=True)
class _Listing:
    """The files of a repository at a commit.

    Attributes:
        prefix: of the paths in the folder that is wanted.
        paths: of all files.
        commit: the revision's.
        download: names below `prefix` -> the folder on this machine that they are in then.
    """

    prefix: str
    paths: list[str]
    commit: str
    download: Callable[[list[str]], Path]


def _list(hub: Any, address: HubAddress) -> _Listing | Fetched:
    """The files of a repository, or with the network off what an earlier download left."""
    endpoint = os.environ.get("HF_ENDPOINT") or None
    with _errors_named(address, hub):
        try:
            info = hub.HfApi(endpoint=endpoint).repo_info(address.repo, revision=address.revision)
        except hub.errors.OfflineModeIsEnabled:
            return _cached(hub, address)
    prefix = f"{address.folder}/" if address.folder else ""

    def download(wanted: list[str]) -> Path:
        with _errors_named(address, hub):
            folder = hub.snapshot_download(
                address.repo,
                revision=address.revision,
                endpoint=endpoint,
                allow_patterns=[glob.escape(prefix + name) for name in wanted],
            )
        if Path(folder).name != info.sha:
            raise InputError(f"{address}: changed from {info.sha} to {Path(folder).name} meanwhile: run again")
        return Path(folder) / address.folder

    return _Listing(prefix, [sibling.rfilename for sibling in info.siblings or ()], info.sha, download)


def _fetch(hub: Any, address: HubAddress, variant: str | None) -> Fetched:
    listed = _list(hub, address)
    if isinstance(listed, Fetched):
        return listed
    names = _names_in(listed.prefix, listed.paths)
    if not names:
        raise InputError(f"{address}: holds no files in {address.folder or 'its top folder'}")
    small = [name for name in names if _is_small(name)]
    chosen = _choose(address, listed, small, names, variant)
    return _fetched(listed.download([*small, *chosen]), address, listed.commit)


def _choose(
    address: HubAddress, listed: _Listing, small: list[str], names: list[str], variant: str | None, below: str = ""
) -> tuple[str, ...]:
    """The weight files among the `names` in a folder `below`, whose `small` files (an index, say) are fetched first."""
    inside = f"{below}/" if below else ""
    folder = listed.download([inside + name for name in small]) / below if small else Path(address.repo) / below
    try:
        return choose_weights(folder, names, variant).files
    except InputError as error:
        raise InputError(f"{address}: {error}") from None


def _names_in(prefix: str, paths: list[str]) -> list[str]:
    """Names of the files that lie in one folder of the repository, not deeper."""
    inside = (path.removeprefix(prefix) for path in paths if path.startswith(prefix))
    return sorted(name for name in inside if "/" not in name)


def _is_small(name: str) -> bool:
    return name == "config.json" or is_index(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in EXTRAS)


def _cached(hub: Any, address: HubAddress) -> Fetched:
    """The snapshot that an earlier download left, when the network is off by HF_HUB_OFFLINE."""
    folder = Path(
        hub.snapshot_download(
            address.repo, revision=address.revision, local_files_only=True, allow_patterns=["config.json"]
        )
    )
    return _fetched(folder / address.folder, address, folder.name)


def _fetched(folder: Path, address: HubAddress, commit: str) -> Fetched:
    return Fetched(folder=folder, origin=Origin(repo=address.repo, commit=commit, folder=address.folder))


@contextmanager
def _errors_named(address: HubAddress, hub: Any) -> Iterator[None]:
    """Turns what the hub's library raises into an `InputError` that says what to do; for calls of that library only."""
    errors = hub.errors
    # The HTTP library below changed over the versions; its base class is a base of the hub's own error.
    http_errors = errors.HfHubHTTPError.__bases__[0]
    own = tuple(
        getattr(errors, name) for name in ("XetDownloadError", "RevisionResolutionError") if hasattr(errors, name)
    )
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"{address}: is gated: ask for access on its page, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{address}: the repository has no revision {address.revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{address}: no such repository, or it is private: check the name, or `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise InputError(
            f"{address}: cannot be reached and is not in the cache ({_first_line(error)}):"
            " check the network and HF_HUB_OFFLINE"
        ) from None
    except (http_errors, *own, OSError) as error:
        raise InputError(
            f"{address}: the download failed ({type(error).__name__}: {_first_line(error)}): run again to carry on"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # What the library raises on an answer that is not the hub's (a proxy's page, another service).
        raise InputError(
            f"{address}: the answer is not the hub's ({type(error).__name__}: {_first_line(error)}): check HF_ENDPOINT"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
