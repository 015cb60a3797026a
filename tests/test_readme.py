"""What the README says, done."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch
import transformers
from command_line import invoke

from shardzoo.zoo import families

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SENTENCE = "The quick brown fox jumps over the lazy dog."


def python_example() -> str:
    """The block under "In your own code"."""
    section = README.partition("## In your own code")[2]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match
    return match[1]


def test_python_example_runs_as_it_stands(smollm2_folder, smollm2_checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "smollm2").symlink_to(smollm2_checkpoint)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(python_example(), "README.md", "exec"), names)
    printed = float(capsys.readouterr().out)

    tokens = transformers.AutoTokenizer.from_pretrained(smollm2_folder)(SENTENCE, return_tensors="pt").input_ids
    assert jnp.array_equal(jnp.asarray(names["tokens"]), jnp.asarray(tokens.numpy()))
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.no_grad():
        expected = math.exp(reference(tokens, labels=tokens).loss)
    assert printed == pytest.approx(expected, rel=1e-4)
    # Sharded: each of the six devices holds a third of the heads.
    weight = names["model"].blocks.attn.q.weight
    assert len(weight.sharding.device_set) == 6
    assert weight.addressable_shards[0].data.shape == (30, 3, 64, 576)


def test_python_example_is_about_ten_lines():
    assert len([line for line in python_example().splitlines() if line.strip()]) <= 11


def test_every_command_and_option_that_is_named_exists():
    listed = re.findall(r"^\| `shardzoo (\w+)[^|]*\|([^\n]*)", README, re.MULTILINE)
    assert {name for name, _ in listed} == set(re.findall(r"^  (\w+) ", commands(), re.MULTILINE))
    for name, text in listed:
        for option in re.findall(r"`(--[a-z-]+)", text):
            assert option in invoke(name, "--help").out, f"{name} {option}"


def test_every_family_has_its_row():
    table = README.partition("| family | models |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == set(families.MODULES)


def commands() -> str:
    return invoke("--help").out.partition("Commands:\n")[2].partition("\n\n")[0]


def test_both_commands_run_sessions_that_exist():
    noxfile = (Path(__file__).parents[1] / "noxfile.py").read_text()
    for session in re.findall(r"nox -s (\w+)", README):
        assert f"\ndef {session}(session" in noxfile


def test_ci_runs_the_readme_s_tests():
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    command = re.search(r"python3 -m venv .venv && .*nox -s tests", README)
    assert command and command[0].replace("pip install nox", "pip install --quiet nox") in script
