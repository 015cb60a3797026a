"""Degrees become axes, and what cannot be made is refused with what to change."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardzoo.errors import InputError
from shardzoo.zoo.mesh import AXES, Degrees, kv_problem, make_mesh


def test_tensor_falls_apart_into_kv_and_rep():
    assert dict(make_mesh(data=2, tensor=4, kv_heads=2).shape) == dict(data=2, pipe=1, context=1, kv=2, rep=2)
    assert dict(make_mesh(tensor=8).shape)["kv"] == 8
    assert Degrees(tensor=8, kv_heads=16).sizes["kv"] == 8
    assert Degrees(context=2, tensor=8, kv_heads=1).sizes == dict(data=1, pipe=1, context=2, kv=1, rep=8)


def test_degrees_of_a_mesh_give_that_mesh():
    for degrees in (Degrees(data=2, tensor=4, kv_heads=2), Degrees(context=4, tensor=2), Degrees(pipe=2, tensor=4)):
        mesh = make_mesh(data=degrees.data, pipe=degrees.pipe, context=degrees.context, tensor=degrees.tensor,
                         kv_heads=degrees.kv_heads)  # fmt: skip
        assert Degrees.of(mesh).sizes == degrees.sizes == dict(mesh.shape)


def test_neighbours_along_tensor_are_neighbouring_devices():
    mesh = make_mesh(data=2, tensor=4, kv_heads=2)
    assert mesh.devices.reshape(2, 4).tolist() == [jax.devices()[:4], jax.devices()[4:]]


@pytest.mark.parametrize(
    "degrees, message",
    [
        (dict(tensor=0), r"tensor=0 is not a whole number of at least 1"),
        (dict(data=4, tensor=4), r"needs 16 devices, this process group has 8"),
        (dict(tensor=4, kv_heads=3), r"kv_heads=3 does not divide by tensor=4, .*use tensor=1, 3, 6"),
    ],
)
def test_refused(degrees, message):
    with pytest.raises(InputError, match=message):
        make_mesh(**degrees)


def test_given_devices_must_be_as_many_as_the_degrees_need():
    with pytest.raises(InputError, match=r"needs 4 devices, 8 were given"):
        make_mesh(tensor=4, devices=jax.devices())
    assert make_mesh(tensor=2, devices=jax.devices()[6:]).devices.size == 2


def test_a_mesh_with_other_axes_is_refused():
    with pytest.raises(InputError, match=r"axes \['pipe', 'context', 'kv', 'rep'\] are missing"):
        Degrees.of(jax.make_mesh((8,), ("data",)))
    with pytest.raises(InputError, match=r"axes \['data', .* are Explicit.*: make it with zoo.make_mesh"):
        Degrees.of(jax.make_mesh((2, 1, 2, 2, 1), AXES))
    mine = Mesh(np.array(jax.devices()).reshape(2, 2, 1, 2, 1, 1), ("rep", "mine", "kv", "data", "context", "pipe"))
    assert Degrees.of(mine) == Degrees(data=2, tensor=2, kv_heads=1)


def test_degrees_in_words():
    assert str(Degrees()) == "one device" and str(Degrees(data=2, tensor=3)) == "data=2,tensor=3"


def test_degrees_may_be_numpys_and_a_huge_one_names_the_nearest():
    degrees = Degrees()
    for name, value in {"data": np.int64(2), "tensor": np.int32(4), "kv_heads": np.int8(2)}.items():
        object.__setattr__(degrees, name, value)  # as where types are not checked
    degrees.__post_init__()
    assert degrees == Degrees(data=2, tensor=4, kv_heads=2) and {type(n) for n in degrees.sizes.values()} == {int}
    said = kv_problem("kv_heads", 6, 10**15 + 3)
    assert said is not None and said.endswith(": use tensor=1, 2, 3, 999999999999996, 1000000000000002")
    assert str(kv_problem("kv_heads", 3, 8)).endswith(": use tensor=1, 3, 6")
