"""Measuring a step: a real trace on CPU devices, and the arithmetic on made-up ones."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardzoo.errors import InputError
from shardzoo.zoo.measure import Device, Measured, length, measure, read_trace, union
from shardzoo.zoo.mesh import TP, make_mesh

PROGRAM = """HloModule jit_step, is_scheduled=true
  %psum.3 = f32[4]{0} all-reduce(%dot.1), channel_id=1
  %gather.5 = (f32[4]{0}, f32[8]{0}) all-gather-start(%dot.2), channel_id=2
  %while.7 = (s32[], f32[4]{0}) while(%tuple.6), condition=%cond, body=%body
"""


def write_trace(folder, events, tracks=()):
    raw = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in tracks]
    for device, op, begin, duration, *more in events:
        arguments = {"hlo_op": op, "hlo_module": more[0] if more else "jit_step", "device_ordinal": str(device)}
        if tracks:
            del arguments["device_ordinal"]
        raw.append({"ph": "X", "pid": device, "tid": 1, "ts": begin, "dur": duration, "name": op, "args": arguments})
    path = folder / "plugins" / "profile" / "now" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": raw}, file)


def test_spans_are_joined():
    spans = [(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (4.0, 5.0)]
    assert union(spans) == [(0.0, 2.0), (3.0, 5.0)]
    assert length(union(spans)) == 4.0


def test_a_trace_tells_collectives_by_the_program_and_leaves_out_what_is_not_of_it(tmp_path):
    events = [(0, "dot.1", 0, 10), (0, "psum.3", 10, 5), (0, "while.7", 0, 50), (0, "dot.1", 0, 99, "jit_other")]
    write_trace(tmp_path, events)
    found = {event.name: event for event in read_trace(tmp_path, PROGRAM)}
    assert set(found) == {"dot.1", "psum.3"}
    assert (found["dot.1"].kind, found["psum.3"].kind) == (None, "all-reduce")
    assert found["psum.3"].begin == pytest.approx(10e-6) and found["psum.3"].end == pytest.approx(15e-6)


def test_devices_are_those_of_the_tracks_where_operations_do_not_say(tmp_path):
    write_trace(tmp_path, [(5, "dot.1", 0, 10), (6, "dot.1", 0, 10)], [(5, "/device:TPU:0"), (6, "/device:TPU:1")])
    assert [event.device for event in read_trace(tmp_path, PROGRAM)] == [0, 1]


def test_no_trace(tmp_path):
    with pytest.raises(InputError, match="holds no trace"):
        read_trace(tmp_path, PROGRAM)


def test_exposed_is_what_nothing_runs_beside(tmp_path):
    """Two steps: a gather of 20 of which 12 run beside a product, and a sum of 6 alone."""
    from shardzoo.zoo import measure as module

    write_trace(tmp_path, [(0, "gather.5", 0, 20), (0, "dot.1", 8, 22), (0, "psum.3", 40, 6), (1, "dot.1", 0, 60)])
    first, second = module._own_devices(read_trace(tmp_path, PROGRAM), 2)
    got = [1e6 * x for x in (first.busy, first.collectives, first.exposed, first.computing)]
    assert got == pytest.approx([36 / 2, 26 / 2, 14 / 2, 22 / 2])
    assert (second.exposed, second.collectives) == (0, 0)


def measured(*computing, **more):
    devices = tuple(Device(i // 2, i % 2, c + 1, 1.0, 1.0, c) for i, c in enumerate(computing))
    rest = dict(seconds=(8.0, 10.0, 30.0), kinds={}, flops=4e9, peak=1e9, memory=None, memory_from="compiler")
    return Measured(devices=devices, **rest | more)


def test_the_straggler_is_the_one_that_computes_longest():
    found = measured(4.0, 4.0, 5.0, 4.0)
    assert (found.straggler.process, found.straggler.device) == (1, 0)
    assert found.lateness == pytest.approx(0.25)
    assert any("process 1, device 0: +25% of the median" in line for line in found.lines())


def test_the_median_step_and_what_of_the_peak_it_reaches():
    found = measured(4.0)
    assert (found.step, found.utilisation, found.straggler) == (10.0, 0.4, None)
    assert found.idle == pytest.approx(1 - 5 / 16)
    assert measured(4.0, flops=None).utilisation is None


def step(mesh):
    def body(x, w):
        y = jnp.tanh(x @ w) @ w.T
        return lax.psum(y, TP) + 0 * lax.all_gather(y[:1], TP, axis=0, tiled=True, to="invarying").sum()

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P(None, TP)), out_specs=P(), check_vma=True))


def test_a_step_on_four_devices(tmp_path):
    x, w = np.ones((128, 256), np.float32), np.full((256, 512), 0.01, np.float32)
    found = measure(step(make_mesh(tensor=4)), x, w, steps=3, flops=2 * 128 * 256 * 512 * 2 / 4, folder=tmp_path)
    assert len(found.seconds) == 3 and len(found.devices) == 4
    assert set(found.kinds) <= {"all-reduce", "all-gather"} and found.kinds["all-reduce"] > 0
    for one in found.devices:
        assert 0 < one.exposed <= 1.001 * one.collectives <= 1.001 * one.busy <= 1.05 * sum(found.seconds) / 3
        assert one.busy == pytest.approx(one.computing + one.exposed)
    assert 0 < found.utilisation < 1.5 and 0 <= found.idle < 1
    assert found.memory > (x.nbytes + w.nbytes / 4) * 0.9 and found.memory_from == "compiler"
    assert list(tmp_path.rglob("*.xplane.pb")), "the trace is kept for other tools"


def test_a_step_that_gives_its_arguments_away():
    train = jax.jit(lambda w, n, x: (w - 0.1 * x.T @ (x @ w), n + 1, jnp.sum(w)), donate_argnums=(0, 1))
    found = measure(train, jnp.ones((64, 8)), jnp.zeros((), jnp.int32), jnp.ones((16, 64)), carry=2, steps=2)
    assert len(found.seconds) == 2 and found.utilisation is None


def test_too_few_steps():
    with pytest.raises(InputError, match="steps=0 is too few"):
        measure(jnp.sin, jnp.ones(3), steps=0)
