"""`measure`: what a pass takes on CPU devices, beside what the audit predicts."""

import dataclasses
import json

import pytest
from command_line import invoke

from shardzoo.zoo import decoder
from shardzoo.zoo.families import FAMILIES, find_family

TINY = decoder.Config(vocab=256, embed=64, layers=3, heads=8, kv_heads=4, head_dim=16, mlp=128)
WORDS = ("measure", "tiny/x", "--mesh", "context=2,tensor=2", "--tokens", 64, "--batch", 2, "--steps", 2)


@pytest.fixture(scope="module", autouse=True)
def tiny_preset():
    FAMILIES["tiny"] = dataclasses.replace(find_family("decoder"), name="tiny", presets={"x": TINY})
    yield
    del FAMILIES["tiny"]


def test_figures_beside_predictions(tmp_path):
    ended = invoke(*WORDS, "--dtype", "float32", "--trace", tmp_path / "trace", "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    measured, predicted = report["measured"], report["predicted"]
    assert report["mesh"] == "context=2,tensor=2" and len(measured["seconds"]) == 2 and len(measured["devices"]) == 4
    # The work of a quarter of the model: weights, and attention that the kernel counts.
    weights = TINY.layers * (3 * TINY.mlp + TINY.head_dim * (2 * TINY.heads + 2 * TINY.kv_heads)) * TINY.embed
    assert predicted["flops"] >= 2 * 128 * (weights + TINY.vocab * TINY.embed) / 4
    assert measured["flops"] == predicted["flops"] and 0 < measured["utilisation"] < 1
    assert measured["kinds"]["all-reduce"] > 0 and measured["kinds"]["all-to-all"] > 0
    assert predicted["sent_bytes"] > 0 and predicted["collectives"] is None  # no published speed between CPU devices
    assert 0.5 < predicted["memory"] / measured["memory"] < 2
    assert list((tmp_path / "trace").rglob("*.trace.json.gz"))


def test_a_table_for_people():
    ended = invoke(*WORDS)
    assert ended.status == 0, ended.err
    for name in ("step", "model FLOPs utilisation", "collectives", "exposed", "idle", "memory", "straggler"):
        assert name in ended.out
    assert "measured" in ended.out and "predicted" in ended.out and "sent" in ended.out


def test_a_mesh_that_does_not_fit():
    ended = invoke("measure", "tiny/x", "--mesh", "tensor=3")
    assert ended.status == 1 and "heads=8 does not divide by 3" in ended.err


def test_sizes_that_a_model_s_inputs_do_not_have_are_refused_by_name():
    ended = invoke("measure", "tiny/x", "--frames", 5, "--width", 64)
    assert ended.status == 1 and "inputs of tiny have no --frames, --width: leave out" in ended.err
    assert "they take --batch, --tokens" in ended.err
    ended = invoke("measure", "image-vae/flux1-vae", "--tokens", 5)
    assert ended.status == 1 and "have no --tokens" in ended.err and "--height, --width" in ended.err
