"""Values of options from what a user types."""

import ml_dtypes
import numpy as np
import pytest
import typer

from shardzoo.cli import options
from shardzoo.zoo.mesh import Degrees


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("tensor=3", Degrees(tensor=3)),
        ("context=2,tensor=4", Degrees(context=2, tensor=4)),
        ("data=2, pipe=3", Degrees(data=2, pipe=3)),
        ("one", Degrees()),
        ("", Degrees()),
    ],
)
def test_meshes(text, degrees):
    assert options.parse_mesh(text) == degrees


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tensr=2", "tensr=2"),
        ("tensor", "tensor"),
        ("tensor=two", "tensor=two"),
        ("tensor=-1", "tensor=-1"),
        ("tensor=2,tensor=3", "tensor=3"),
        ("tensor=0", "tensor=0"),
        ("kv=2", "kv=2"),
        ("one,tensor=2", "one"),
    ],
)
def test_meshes_that_cannot_be_read_are_named(text, named):
    with pytest.raises(typer.BadParameter, match=named):
        options.parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("400MiB", 400 << 20), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("64k", 64000), ("1048576", 1 << 20)],
)
def test_sizes(text, count):
    assert options.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "0GiB", "12XB", "1e9", "MiB"])
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(typer.BadParameter, match="write for example 400MiB"):
        options.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bf16", ml_dtypes.bfloat16), ("BFloat16", ml_dtypes.bfloat16), ("fp32", np.float32), ("float16", np.float16)],
)
def test_dtypes(text, dtype):
    assert options.parse_dtype(text) == np.dtype(dtype)


def test_dtypes_that_are_not_cast_to():
    with pytest.raises(typer.BadParameter, match=r"int8.*bf16"):
        options.parse_dtype("int8")
