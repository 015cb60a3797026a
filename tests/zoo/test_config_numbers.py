"""Bases of rotary angles and epsilons of norms, which every config checks itself: 0 or less divides by nothing."""

import dataclasses

import pytest

from shardzoo.errors import InputError
from shardzoo.zoo.families import MODULES, find_family
from shardzoo.zoo.rope import Rope

NUMBERS = ("theta", "eps", "norm_eps", "statistics_eps")
CONFIGS = {name: next(iter(find_family(name).presets.values())) for name in MODULES} | {"rope": Rope()}
FIELDS = [(name, f.name) for name, c in CONFIGS.items() for f in dataclasses.fields(c) if f.name in NUMBERS]


@pytest.mark.parametrize("value", [0.0, -1e-6, float("inf"), float("nan")])
@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_a_number_that_is_not_above_zero_is_refused(family, field, value):
    with pytest.raises(InputError, match=f"{field}={value} is not a number above 0"):
        dataclasses.replace(CONFIGS[family], **{field: value})


def test_every_family_with_norms_or_angles_is_among_them():
    assert {name for name, _ in FIELDS} == set(CONFIGS) - {"wan-vae"}
