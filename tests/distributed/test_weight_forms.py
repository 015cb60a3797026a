"""Two processes of four CPU devices: quantized while restoring, with adapters, merged, saved; as one process has it."""

from pathlib import Path

import jax
import pytest
from load_workers import load_workers
from mesh_parity import harsh
from processes import run
from tiny_flux import CONFIG

from shardzoo import checkpoints
from shardzoo.zoo import flux, layout
from shardzoo.zoo.mesh import make_mesh

workers = load_workers(Path(__file__).with_name("weight_workers.py"))


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow), None])
def test_saved_by_two_processes_as_by_one(tmp_path, kind):
    """Weights that are split on their inputs over both: their scales are of all inputs, on either process."""
    declared, mesh = flux.declare(CONFIG), make_mesh()
    checkpoints.save(tmp_path / "plain", layout.place(declared, mesh, harsh(declared)), declared, sync=False)
    words = {"path": str(tmp_path / "plain"), "degrees": {"tensor": 8}, "kind": kind}
    results = run(workers.quantize_attach_save, {**words, "to": str(tmp_path / "two")})
    alone = workers.quantize_attach_save(**{**words, "degrees": {}, "to": str(tmp_path / "one")})
    if kind is not None:  # merged weights may differ in their last bits
        assert results == [alone, alone]
    two, one = (checkpoints.restore(tmp_path / name, mesh) for name in ("two", "one"))
    assert jax.tree.structure(two) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        assert a.dtype == b.dtype and abs(a.astype("float32") - b.astype("float32")).max() <= 1e-6
