"""Eight CPU devices, and every annotated function of the package checked by jaxtyping and beartype."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Jobs that a shell starts in the background ignore Ctrl-C, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxtyping import install_import_hook

install_import_hook("shardzoo", "beartype.beartype")

# The same cases each time, so that a run speaks of the change it is for; HYPOTHESIS_PROFILE=default searches on.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_end_with_their_file() -> Iterator[None]:
    """Kept over all files, they come to many GiB."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: real weights, float32, two shards, tied embeddings."""
    from smollm2 import example

    script = example("smollm2")
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    script.write_folder(script.gguf_file(), folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_folder: Path) -> Path:
    """The same, converted."""
    from shardzoo.convert.convert import convert

    checkpoint = smollm2_folder.with_name("checkpoint")
    convert(smollm2_folder, checkpoint, sync=False)
    return checkpoint
