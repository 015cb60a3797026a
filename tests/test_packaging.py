"""What an installation holds and where it works: wheel and editable, in fresh environments."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "demo", "*.egg-info", "__pycache__")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
OFFLINE = ("--no-deps", "--no-build-isolation")


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> list[str]:
    return settings()["tool"]["setuptools"]["packages"]


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree, so that builds leave nothing in this one; its name is not the package's."""
    return shutil.copytree(ROOT, tmp_path / "checkout", ignore=NOT_SOURCE)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh environment that sees the run-time dependencies of this one, and not its editable shardzoo."""
    folder = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def installed(environment: Path) -> set[str]:
    """Importable names at the top level of an environment."""
    (site,) = environment.glob("lib/python*/site-packages")
    return {
        path.name
        for path in site.iterdir()
        if path.name != "__pycache__" and (path.suffix == ".py" or path.is_dir()) and path.suffix != ".dist-info"
    }


def check_works(environment: Path, elsewhere: Path) -> Path:
    """Imports every package and runs the command from a folder that has nothing to do with the source."""
    elsewhere.mkdir()
    names = ", ".join(packages())
    found = run(environment / "bin/python", "-c", f"import {names}; print(shardzoo.__file__)", cwd=elsewhere)
    assert "Usage: shardzoo" in run(environment / "bin/shardzoo", "--help", cwd=elsewhere)
    assert run(environment / "bin/python", "-m", "shardzoo", "--version", cwd=elsewhere).startswith("shardzoo ")
    return Path(found.strip())


def test_every_package_folder_is_listed():
    folders = [path.parent.relative_to(ROOT).parts for path in ROOT.glob("**/__init__.py")]
    apart = {"tests", "examples", "benchmarks", "build", "dist", "demo"}
    found = {
        ".".join(("shardzoo", *folder))
        for folder in folders
        if not folder or not (folder[0] in apart or folder[0].startswith("."))
    }
    assert found == set(packages())


def test_wheel_holds_the_package_and_nothing_else(tree, environment, tmp_path):
    run(*PIP, "wheel", *OFFLINE, "-w", tmp_path / "wheels", tree, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"shardzoo", wheel.name.split("-py3")[0] + ".dist-info"}
    folders = [Path(*name.split(".")[1:]) for name in packages()]
    expected = {f"shardzoo/{path.relative_to(tree)}" for folder in folders for path in (tree / folder).glob("*.py")}
    expected -= {"shardzoo/noxfile.py", "shardzoo/setup.py"}
    assert {name for name in names if name.startswith("shardzoo/")} == expected | {"shardzoo/py.typed"}

    run(*PIP, "--python", environment / "bin/python", "install", "--no-deps", wheel, cwd=tmp_path)
    assert installed(environment) == {"shardzoo"}
    assert check_works(environment, tmp_path / "elsewhere").is_relative_to(environment)


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_install_points_at_the_source(mode, tree, environment, tmp_path):
    run(
        *(*PIP, "--python", environment / "bin/python", "install", *OFFLINE),
        *("--config-settings", f"editable_mode={mode}", "-e", tree),
        cwd=tmp_path,
    )
    assert {name for name in installed(environment) if not name.startswith("__editable__")} <= {"shardzoo"}
    assert check_works(environment, tmp_path / "elsewhere").is_relative_to(tree)
    (tree / "errors.py").write_text((tree / "errors.py").read_text() + "\nCHANGED = True\n")
    run(environment / "bin/python", "-c", "from shardzoo.errors import CHANGED", cwd=tmp_path / "elsewhere")


def test_nothing_at_run_time_imports_the_test_packages(tmp_path):
    names = ", ".join(packages())
    code = f"import sys, {names}; print(sorted({{'torch', 'transformers', 'gguf', 'hypothesis'}} & set(sys.modules)))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "[]"


def test_versions_are_bounded_only_where_something_needs_it():
    dependencies = settings()["project"]["dependencies"]
    bounded = [line for line in dependencies if "<" in line or "==" in line]
    assert [line.partition(">")[0] for line in bounded] == ["orbax-checkpoint"]
    assert not any(line.startswith("torch") for line in dependencies)
