"""`hf://` addresses against a server on this machine that answers as the hub does."""

import builtins
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import tiny_models
import tiny_wan
import torch
from command_line import invoke
from huggingface_hub import constants, file_download
from safetensors.torch import save, save_file

from shardzoo import checkpoints
from shardzoo.convert import hub
from shardzoo.convert.convert import convert
from shardzoo.convert.hub import HubAddress, Origin, parse_address
from shardzoo.convert.pipeline_source import find_pipeline
from shardzoo.convert.source import open_source
from shardzoo.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = {"a.weight": torch.arange(3000.0).reshape(50, 60), "a.bias": torch.ones(3, dtype=torch.bfloat16)}


@dataclass
class Repository:
    """One repository: files by path, and how the server behaves for it."""

    files: dict[str, bytes] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    hidden: bool = False  # as the hub answers for a private or missing repository
    gated: int = 0  # status of every download
    drop_after: int | None = None  # bytes of each download after which the connection breaks
    drops: int = 0  # how many downloads break
    status: int = 0  # status of every answer
    body: bytes | None = None  # body of every answer of the API, in place of the real one


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str, str | None]] = []

    def handle_error(self, request, client_address):
        """A client that hangs up, or a connection broken on purpose, is no news."""

    @property
    def downloaded(self) -> set[str]:
        return {
            path.split("/resolve/", 1)[1].split("/", 1)[1]
            for verb, path, _ in self.asked
            if verb == "GET" and "/resolve/" in path
        }


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        """Quiet."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name = (api or file)[1] if api or file else ""
        repository = self.server.repositories.get(name)
        if repository is None or repository.hidden:
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if repository.status:
            return self.refuse(repository.status, None, "out of order")
        revision = api[3] if api else file[2]
        if revision is not None and revision not in repository.revisions:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.answer_api(repository, name, api[2]) if api else self.answer_file(repository, file[3])

    def answer_api(self, repository: Repository, name: str, kind: str | None) -> None:
        if repository.body is not None:
            return self.reply(200, repository.body)
        if kind == "tree":
            value = [
                {"type": "file", "path": path, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for path, raw in repository.files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in repository.files]
            value = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False}
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer_file(self, repository: Repository, path: str) -> None:
        if repository.gated:
            return self.refuse(repository.gated, "GatedRepo", "Access to this model is restricted")
        if path not in repository.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        raw = repository.files[path]
        headers = {"ETag": f'"{hashlib.sha1(raw).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1]) if self.headers.get("Range") else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
        limit = None
        if repository.drop_after is not None and repository.drops > 0 and self.command == "GET" and len(raw) > 5000:
            repository.drops -= 1
            limit = repository.drop_after
        self.reply(206 if start else 200, raw[start:], headers, limit)

    def refuse(self, status: int, code: str | None, message: str) -> None:
        self.reply(status, b"", {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}))

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, limit: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:limit])
        if limit is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


def weights(tensors=WEIGHTS) -> bytes:
    return save(tensors)


@pytest.fixture
def served(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(served) -> Repository:
    first, second = dict(list(WEIGHTS.items())[:1]), dict(list(WEIGHTS.items())[1:])
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"metadata": {}, "weight_map": dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])}
    repository = Repository(
        {
            "config.json": b'{"model_type": "x"}',
            "tokenizer.json": b"{}",
            "README.md": b"# hello",
            "model.safetensors.index.json": json.dumps(index).encode(),
            names[0]: weights(first),
            names[1]: weights(second),
            "pytorch_model.bin": b"x" * 10_000,
            "model.fp16.safetensors": weights(second),
            "tf_model.h5": b"x" * 10_000,
            "onnx/model.onnx": b"x" * 10_000,
            "vae/config.json": b'{"part": "vae"}',
            "vae/diffusion_pytorch_model.safetensors": weights(second),
        }
    )
    served.repositories["owner/model"] = repository
    return repository


def problem(address: str, **options) -> str:
    with pytest.raises(InputError) as error:
        open_source(address, **options).close()
    assert str(error.value).startswith(address)
    return str(error.value)


# What is fetched


@pytest.mark.parametrize(
    "address", ["hf://owner/model", "hf://owner/model@main", f"hf://owner/model@{COMMIT}", Path("hf://owner/model")]
)
def test_a_repository_opens_and_only_what_is_needed_is_fetched(served, model, address):
    with open_source(address) as source:
        assert source.tensors.keys() == WEIGHTS.keys()
        for key, tensor in WEIGHTS.items():
            assert source.read(key).tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert source.config == {"model_type": "x"}
        assert [path.name for path in source.extras] == ["tokenizer.json"]
        assert source.hub == Origin(repo="owner/model", commit=COMMIT, folder="")
    assert served.downloaded == {
        "config.json", "tokenizer.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip


def test_a_second_time_nothing_is_fetched(served, model):
    open_source("hf://owner/model").close()
    served.asked.clear()
    open_source("hf://owner/model").close()
    assert served.downloaded == set()


def test_a_folder_of_a_repository(served, model):
    with open_source("hf://owner/model@main/vae") as source:
        assert source.tensors.keys() == {"a.bias"} and source.config == {"part": "vae"}
    assert served.downloaded == {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    assert "holds no files in nothing" in problem("hf://owner/model/nothing")


def test_a_pipeline_is_fetched_with_all_its_components_and_nothing_else(served, tmp_path):
    folder = tiny_wan.save("t2v", tmp_path / "wan")
    files = tiny_models.files(folder)
    junk = {"README.md": b"x", "assets/a.mp4": b"x", "text_encoder/pytorch_model.bin": b"x", "other/config.json": b"{}"}
    served.repositories["owner/wan"] = Repository(files | junk)
    served.repositories["owner/llama"] = Repository({"config.json": b"{}", "model.safetensors": weights(WEIGHTS)})
    assert find_pipeline("hf://owner/llama") is None
    found = find_pipeline("hf://owner/wan@main")
    assert tiny_models.files(found.root) == files and served.downloaded == set(files)
    assert found.settings["hub"] == {"repo": "owner/wan", "commit": COMMIT, "folder": ""}
    assert found.components == find_pipeline(folder).components and found.files == find_pipeline(folder).files
    ended = invoke("convert", "hf://owner/wan", tmp_path / "dst", "--component", "text_encoder")
    assert ended.status == 0 and "text_encoder: 22 tensors" in ended.out, ended.err


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"../x": ["a", "Tokenizer"]}, "'../x': is not the name of a folder"),
        ({"vae": "AutoencoderKL"}, r"'vae': 'AutoencoderKL' is not [library, class]"),
        ({"vae": []}, "'vae': [] is not [library, class]"),
    ],
)
def test_a_pipeline_with_a_damaged_index_is_not_fetched(served, index, said):
    files = {"model_index.json": json.dumps({"_class_name": "FluxPipeline"} | index).encode()}
    served.repositories["owner/damaged"] = Repository(files | {"vae/model.safetensors": weights(WEIGHTS)})
    with pytest.raises(InputError) as error:
        find_pipeline("hf://owner/damaged")
    assert said in str(error.value) and served.downloaded == {"model_index.json"}


def test_the_manifest_says_which_commit_a_checkpoint_came_from(served, tmp_path):
    folder = tiny_models.save("llama-tied", tmp_path / "llama")
    served.repositories["owner/llama"] = Repository({f"sub/{k}": v for k, v in tiny_models.files(folder).items()})
    convert("hf://owner/llama@main/sub", tmp_path / "ckpt", sync=False)
    detail = checkpoints.open(tmp_path / "ckpt").manifest.header.detail
    assert detail["hub"] == {"repo": "owner/llama", "commit": COMMIT, "folder": "sub"}
    convert(folder, tmp_path / "local", sync=False)
    assert checkpoints.open(tmp_path / "local").manifest.header.detail["hub"] is None


def test_a_variant_of_a_repository(served, model):
    with open_source("hf://owner/model", variant="fp16") as source:
        assert source.tensors.keys() == {"a.bias"}
    assert "model.fp16.safetensors" in served.downloaded
    assert not any("of-00002" in name for name in served.downloaded)
    assert "holds no variant 'bf16'" in problem("hf://owner/model", variant="bf16")


def test_a_repository_of_pytorch_files(served, tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.bin")
    files = {"pytorch_model.bin": (tmp_path / "a.bin").read_bytes(), "training_args.bin": b"x", "config.json": b"{}"}
    served.repositories["owner/old"] = Repository(files)
    with open_source("hf://owner/old") as source:
        assert source.tensors.keys() == WEIGHTS.keys() and source.files[0].kind == "pt-zip"
    assert served.downloaded == {"pytorch_model.bin", "config.json"}


def test_names_that_are_patterns_are_taken_as_they_are(served):
    served.repositories["owner/odd"] = Repository({"model[1].safetensors": weights(), "model1.bin": b"x"})
    with open_source("hf://owner/odd") as source:
        assert source.tensors.keys() == WEIGHTS.keys()
    assert served.downloaded == {"model[1].safetensors"}


def test_a_file_damaged_on_the_way_is_refused(served, model):
    model.files["model-00001-of-00002.safetensors"] = model.files["model-00001-of-00002.safetensors"][:-100]
    with pytest.raises(InputError, match="100 bytes are missing"):
        open_source("hf://owner/model")


def test_a_connection_that_breaks_is_taken_up_where_it_broke(served, model, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    model.drop_after, model.drops = 1000, 2
    with open_source("hf://owner/model") as source:
        assert source.read("a.weight").tobytes() == WEIGHTS["a.weight"].numpy().tobytes()
    big = "model-00001-of-00002.safetensors"
    assert [ask[2] for ask in served.asked if ask[0] == "GET" and ask[1].endswith(big)] == [
        None,
        "bytes=1000-",
        "bytes=2000-",
    ]


def test_in_a_process_of_its_own_by_environment(served, model, tmp_path):
    script = """
        import sys
        from shardzoo.convert.source import open_source
        with open_source("hf://owner/model") as source:
            print(sorted(source.tensors), source.hub.commit)
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    run = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"['a.bias', 'a.weight'] {COMMIT}\n", done.stderr
    # Without a network, by the hub's own switch, the copy in the cache is opened; a repository never fetched is named.
    served.asked.clear()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(run, env=offline, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"['a.bias', 'a.weight'] {COMMIT}\n" and served.asked == []
    other = [run[0], run[1], run[2].replace("owner/model", "owner/other")]
    done = subprocess.run(other, env=offline, capture_output=True, text=True, timeout=120)
    assert "hf://owner/other: cannot be reached and is not in the cache" in done.stderr


# What goes wrong


def test_a_missing_or_private_repository(served):
    assert "no such repository, or it is private" in problem("hf://owner/none")
    served.repositories["owner/hidden"] = Repository({"model.safetensors": weights()}, hidden=True)
    assert "set HF_TOKEN" in problem("hf://owner/hidden")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository(served, model, status):
    model.gated = status
    assert "is gated: ask for access on its page, then `hf auth login` or set HF_TOKEN" in problem("hf://owner/model")


def test_a_missing_revision(served, model):
    assert "the repository has no revision 'v9'" in problem("hf://owner/model@v9")


def test_a_connection_that_always_breaks(served, model):
    model.drop_after, model.drops = 0, 1000
    text = problem("hf://owner/model")
    assert "the download failed" in text and "run again to carry on" in text


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_out_of_order(served, model, status, monkeypatch):
    model.status = status
    assert re.search("the download failed|cannot be reached", problem("hf://owner/model"))


@pytest.mark.parametrize(
    "body", [b"<html>log in to the wireless network</html>", b"[]", b"{}", b'{"id": 3, "siblings": [{}]}', b"\xff"]
)
def test_an_answer_that_is_not_the_hubs(served, model, body):
    model.body = body
    problem("hf://owner/model")


def test_no_server_at_all(served, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert re.search("the download failed|cannot be reached", problem("hf://owner/model"))
    monkeypatch.setenv("HF_ENDPOINT", "no url")
    problem("hf://owner/model")


def test_a_repository_without_weights(served):
    served.repositories["owner/empty"] = Repository({"README.md": b"x"})
    assert "holds no weights" in problem("hf://owner/empty")
    served.repositories["owner/empty"] = Repository({"config.json": b"{}"})
    assert "holds no weights" in problem("hf://owner/empty")


def test_a_mistake_of_our_own_is_not_blamed_on_the_hub(served, model, monkeypatch):
    def mistaken(*_):
        raise TypeError("a mistake")

    monkeypatch.setattr(hub, "choose_weights", mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        open_source("hf://owner/model")


def test_a_disk_that_is_full(served, model, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "the download failed (OSError: [Errno 28] No space left on device)" in problem("hf://owner/model")


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert "needs huggingface_hub: pip install 'shardzoo[hub]'" in problem("hf://owner/model")


# Addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://owner/name", ("owner/name", None, "")),
        ("hf:/owner/name", ("owner/name", None, "")),
        ("hf://owner/name/", ("owner/name", None, "")),
        ("hf://o-1/Wan2.1-T2V_x", ("o-1/Wan2.1-T2V_x", None, "")),
        ("hf://owner/name@v1.0", ("owner/name", "v1.0", "")),
        ("hf://owner/name@v1/a/b", ("owner/name", "v1", "a/b")),
        ("hf://owner/name/a/b/", ("owner/name", None, "a/b")),
        ("hf://owner/name@refs/pr/3", ("owner/name", "refs/pr/3", "")),
        ("hf://owner/name@refs/pr/3/a", ("owner/name", "refs/pr/3", "a")),
        ("hf://owner/name@feature%2Fx", ("owner/name", "feature/x", "")),
    ],
)
def test_addresses(text, parts):
    assert parse_address(text) == HubAddress(repo=parts[0], revision=parts[1], folder=parts[2])


@pytest.mark.parametrize(
    "text", ["hf://", "hf://owner", "hf://owner/", "hf://o/n@", "hf://o/n/../x", "hf://o n/m", "hf://o/n@a@b"]
)
def test_bad_addresses(text):
    with pytest.raises(InputError, match="is no address of the form"):
        open_source(text)


def test_an_address_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    save_file(WEIGHTS, Path("hf") / "model.safetensors")
    assert not hub.is_hub_address("hf") and not hub.is_hub_address("./hf:/x")
    with open_source("hf") as source:
        assert source.tensors.keys() == WEIGHTS.keys()
