"""Samplers against diffusers': the same schedules bit for bit, the same samples to float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from shardzoo.errors import InputError
from shardzoo.zoo import sampling
from shardzoo.zoo.sampling import euler, guided, high_noise_steps, run, unipc

TOLERANCE = 2e-6
STEPS = (1, 2, 3, 4, 10, 50)
rng = np.random.default_rng(0)
VIDEO, TOKENS = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 4, 5, 6), (1, 16, 7)))


def field(x, t, lib=jnp):
    """A velocity that depends on sample and timestep."""
    return lib.tanh(x * 1.3 + 0.3) * (0.5 + t / 1000.0) - 0.2 * x


def trajectory(sampler, x, velocity=field):
    """Every sample on the way, stepped one by one with a traced index."""
    step = jax.jit(lambda i, state, x: sampler.step(i, state, x, velocity(x, jnp.asarray(sampler.timesteps)[i])))
    state, found = sampler.init(x), []
    for i in range(len(sampler.timesteps)):
        state, x = step(i, state, x)
        found.append(np.asarray(x))
    return found


def reference(scheduler, x, velocity=field, wide=False):
    """What the pipelines of diffusers do."""
    scheduler.set_begin_index(0)
    scheduler.sigmas = scheduler.sigmas.double() if wide else scheduler.sigmas
    x, found = torch.tensor(x, dtype=torch.float64 if wide else torch.float32), []
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, t, torch), t, x, return_dict=False)[0]
        found.append(x.numpy())
    return found


def assert_same(sampler, scheduler, x, wide=False):
    """Levels and timesteps bit for bit, the sample after each step by its largest element."""
    np.testing.assert_array_equal(sampler.levels, scheduler.sigmas.numpy())
    np.testing.assert_array_equal(sampler.timesteps, scheduler.timesteps.numpy())
    for i, (got, want) in enumerate(zip(trajectory(sampler, x), reference(scheduler, x, wide=wide), strict=True)):
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), f"step {i}"


def wan_scheduler(steps, shift=1.0, order=2, mu=None, levels=None):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=order,
        use_dynamic_shifting=mu is not None,
    )
    scheduler.set_timesteps(steps, sigmas=levels, mu=mu)
    return scheduler


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_unipc(steps, shift):
    assert_same(unipc(steps, shift=shift), wan_scheduler(steps, shift), VIDEO if steps % 2 else TOKENS)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("order", [1, 3])
def test_unipc_of_other_orders(steps, order):
    assert_same(unipc(steps, shift=3.0, order=order), wan_scheduler(steps, 3.0, order), TOKENS)


@pytest.mark.parametrize("steps", [4, 20, 100])
def test_unipc_against_a_reference_in_float64(steps):
    assert_same(unipc(steps, shift=5.0), wan_scheduler(steps, 5.0), VIDEO, wide=True)


@pytest.mark.parametrize("steps", [1, 5, 30])
def test_unipc_with_an_exponent_for_a_shift(steps):
    assert_same(unipc(steps, mu=0.9), wan_scheduler(steps, mu=0.9), TOKENS)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shift", [3.0, 12.0])
def test_the_schedule_of_the_wan_repositories(steps, shift):
    """Levels of theirs: those of 1,000 training steps, from 0.999 to 0, then evenly spaced, then shifted."""
    trained = 1.0 - np.linspace(1, 1 / 1000, 1000)[::-1]
    ends = torch.from_numpy(trained.copy()).float()[[0, -1]]
    levels = np.linspace(ends[0].item(), ends[1].item(), steps + 1)[:-1]
    np.testing.assert_array_equal(sampling.wan_levels(steps), levels)
    sampler = unipc(steps, shift=shift, levels=sampling.wan_levels(steps))
    assert_same(sampler, wan_scheduler(steps, shift, levels=levels.copy()), TOKENS)
    assert abs(sampler.levels[0] - shift * 0.999 / (1 + (shift - 1) * 0.999)) < 1e-6


def test_the_first_step_of_unipc_has_no_corrector_and_the_last_gives_the_data():
    sampler = unipc(7, shift=3.0)
    np.testing.assert_array_equal(sampler.corrector[0], [1, 0, 0, 0, 0])
    assert (sampler.corrector[1:, 0] == 0).all()
    np.testing.assert_array_equal(sampler.predictor[-1], [0, 1, 0])
    assert np.isfinite(sampler.predictor).all() and np.isfinite(sampler.corrector).all()


def euler_scheduler(steps, mu=None, levels=None, **config):
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=mu is not None, **config)
    scheduler.set_timesteps(steps, sigmas=levels, mu=mu)
    return scheduler


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_euler(steps, shift):
    assert_same(euler(steps, shift=shift), euler_scheduler(steps, shift=shift), VIDEO if steps % 2 else TOKENS)
    levels = sampling.image_levels(steps)
    assert_same(euler(steps, shift=shift, levels=levels), euler_scheduler(steps, levels=levels, shift=shift), TOKENS)


@pytest.mark.parametrize("steps", [2, 4, 28])
@pytest.mark.parametrize("tokens", [256, 1000, 4096])
def test_euler_as_the_image_pipelines_shift_it(steps, tokens):
    flux = sampling.image_mu(tokens)
    assert flux == calculate_shift(tokens)
    levels = sampling.image_levels(steps)
    assert_same(euler(steps, mu=flux, levels=levels), euler_scheduler(steps, flux, levels), TOKENS)
    qwen = sampling.image_mu(tokens, max_tokens=8192, max_shift=0.9)
    assert qwen == calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    scheduler = euler_scheduler(steps, qwen, levels, shift_terminal=0.02)
    assert_same(euler(steps, mu=qwen, last=0.02, levels=levels), scheduler, TOKENS)


@pytest.mark.parametrize("steps", [1, 4, 10, 28, 50, 200])
@pytest.mark.parametrize("tokens", [1, 256, 4096, 4300, 4301, 9999])
def test_euler_as_flux2_shifts_it(steps, tokens):
    mu = sampling.fitted_mu(tokens, steps)
    assert mu == compute_empirical_mu(tokens, steps)
    levels = sampling.image_levels(steps)
    ours, theirs = euler(steps, mu=mu, levels=levels), euler_scheduler(steps, mu, levels, shift=3.0)
    np.testing.assert_array_equal(ours.levels, theirs.sigmas.numpy())
    np.testing.assert_array_equal(ours.timesteps, theirs.timesteps.numpy())


@pytest.mark.parametrize("steps", [1, 3, 28])
@pytest.mark.parametrize("mu", [0.3, 1.15, 3.0])
@pytest.mark.parametrize("last", [None, 0.02])
def test_euler_with_a_linear_shift(steps, mu, last):
    levels = sampling.image_levels(steps)
    if steps == 1 and last:  # of a single level, 1, diffusers makes NaN
        np.testing.assert_array_equal(euler(1, mu=mu, curve="linear", last=last, levels=levels).levels, [1, 0])
        return
    scheduler = euler_scheduler(steps, mu, levels, time_shift_type="linear", shift_terminal=last)
    assert_same(euler(steps, mu=mu, curve="linear", last=last, levels=levels), scheduler, TOKENS)


@pytest.mark.parametrize("sampler", [euler(6, shift=3.0), unipc(6, shift=3.0)], ids=["euler", "unipc"])
def test_one_scan_is_the_steps_one_by_one(sampler):
    """Also with the sampler as an argument, from a state given by hand, and differentiated."""
    want = trajectory(sampler, VIDEO)[-1]
    inside = jax.jit(lambda sampler, x: run(sampler, field, x)[1])(sampler, VIDEO)
    np.testing.assert_allclose(np.asarray(inside), want, rtol=1e-6, atol=1e-6)
    state, x = run(sampler, field, VIDEO, stop=2)
    state, x = run(sampler, field, x, state, first=2, stop=2)
    _, x = run(sampler, field, x, state, first=2)
    np.testing.assert_allclose(np.asarray(x), want, rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(run(sampler, field, x)[1] ** 2))(VIDEO)
    shift = 1e-2 * rng.normal(size=VIDEO.shape).astype(np.float32)
    ends = [float(jnp.sum(run(sampler, field, VIDEO + sign * shift)[1] ** 2)) for sign in (1, -1)]
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * shift), (ends[0] - ends[1]) / 2, rtol=1e-2)


@pytest.mark.parametrize("make", [euler, unipc])
def test_samples_keep_their_dtype_and_sums_are_in_float32(make):
    sampler, half = make(5, shift=3.0), jnp.asarray(TOKENS, jnp.bfloat16)
    for leaf in jax.tree.leaves(sampler.init(half)):
        assert leaf.dtype == jnp.float32
    _, after = sampler.step(0, sampler.init(half), half, jnp.ones_like(half))
    _, wide = sampler.step(0, sampler.init(half), half.astype(jnp.float32), jnp.ones(half.shape))
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(after), np.asarray(wide.astype(jnp.bfloat16)))


@pytest.mark.parametrize("steps", [1, 2, 7, 40, 50])
@pytest.mark.parametrize("boundary, shift", [(0.875, 12.0), (0.9, 5.0), (1.0, 5.0), (0.0, 5.0)])
def test_experts_change_once_where_the_pipeline_changes_them(steps, boundary, shift):
    sampler, scheduler = unipc(steps, shift=shift), wan_scheduler(steps, shift)
    high = [bool(t >= boundary * 1000) for t in scheduler.timesteps]
    count = high_noise_steps(sampler, boundary)
    assert high == [True] * count + [False] * (steps - count)

    def low(x, t, lib=jnp):
        return 0.7 * field(x, t, lib) + 0.1

    state, x = run(sampler, field, VIDEO, stop=count)
    _, x = run(sampler, low, x, state, first=count)
    want = reference(scheduler, VIDEO, lambda x, t, lib: field(x, t, lib) if t >= boundary * 1000 else low(x, t, lib))[
        -1
    ]
    assert np.abs(np.asarray(x) - want).max() <= TOLERANCE * np.abs(want).max()


def velocity(x, t, condition):
    """Every argument matters; each row of the batch by itself."""
    t = t.reshape(-1, *(1,) * (x.ndim - 1)) if jnp.ndim(t) else t
    return (
        jnp.tanh(x) * condition["text"][:, :, None, None, None]
        + t / 1000
        + condition["more"][:, None, None, None, None]
    )


CONDITIONS = [
    {"text": rng.normal(size=(2, 3)).astype(np.float32), "more": rng.normal(size=2).astype(np.float32)} for _ in "wu"
]


@pytest.mark.parametrize(
    "timestep", [np.array(731, np.float32), np.array([12.0, 731.0], np.float32)], ids=["scalar", "rows"]
)
def test_guidance_in_one_call_and_in_two(timestep):
    timestep = np.asarray(timestep)
    w, u = (np.asarray(velocity(VIDEO, timestep, c)) for c in CONDITIONS)
    for together in (False, True):
        f = jax.jit(guided(velocity, *CONDITIONS, 5.0, together=together))
        got = np.asarray(f(VIDEO, jnp.asarray(timestep)))
        np.testing.assert_allclose(got, u + 5.0 * (w - u), rtol=2e-6, atol=1e-5)
    calls = []
    guided(lambda x, t, c: calls.append(x.shape) or velocity(x, t, c), *CONDITIONS, 5.0, together=True)(VIDEO, timestep)
    assert calls == [(4, 3, 4, 5, 6)]


def test_guidance_within_a_run():
    scheduler = wan_scheduler(5, 3.0)
    pair = [{k: torch.tensor(v) for k, v in c.items()} for c in CONDITIONS]

    def theirs(x, t, lib):
        w, u = (
            torch.tanh(x) * c["text"][:, :, None, None, None] + t / 1000 + c["more"][:, None, None, None, None]
            for c in pair
        )
        return u + 4.0 * (w - u)

    want = reference(scheduler, VIDEO, theirs)[-1]
    got = run(unipc(5, shift=3.0), guided(velocity, *CONDITIONS, 4.0, together=True), VIDEO)[1]
    assert np.abs(np.asarray(got) - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: unipc(0), "steps=0"),
        (lambda: unipc(4, shift=float("inf")), "shift=inf is not above 0 and finite"),
        (lambda: euler(3, shift=0.0), "shift=0.0"),
        (lambda: euler(3, shift=2.0, mu=1.0), "shift=2.0 and mu=1.0"),
        (lambda: euler(3, mu=-1.0, curve="linear"), "mu=-1.0 is not above 0"),
        (lambda: unipc(3, order=4), "order=4"),
        (lambda: unipc(3, levels=[1.0, 0.5]), "2 were given for steps=3"),
        (lambda: run(euler(3), field, VIDEO, stop=4), "first=0, stop=4 are not steps of 0 to 3"),
        (lambda: run(unipc(3), field, VIDEO, first=1), "first=1 without a state"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InputError, match=message):
        call()
