"""Samplers of flow-matching models: Euler and UniPC, guidance, and the steps that each of two experts takes.

At noise level s a sample is (1 - s) * data + s * noise, and a model gives its velocity, noise - data. A sampler is made
with numpy for a number of steps beforehand; a step is a pure function of arrays, for `jit` and `lax.scan`.

Source: FlowMatchEulerDiscreteScheduler and UniPCMultistepScheduler of diffusers, as the pipelines of FLUX.1, FLUX.2,
Qwen-Image and Wan set them up. The scheduler of the Wan repositories is the same solver over slightly other levels
(`wan_levels`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num, PyTree

from shardzoo.errors import InputError, fail_if, not_whole

TRAIN_STEPS = 1000  # timesteps are noise levels times this
MOST_MU = 80  # exp(mu) is a number of float32 up to here
CLOSE_TO_NOISE = 1e-6  # UniPC stays this far from level 1, where the logarithm of the data's share is infinite
Host = Array | np.ndarray  # samplers hold numpy's, or traced arrays where one is an argument of a jitted function
Velocity = Callable[[Host, Host], Array]  # of a sample at a timestep (a scalar)
Curve = Literal["exponential", "linear"]  # what a resolution's shift does to the levels


def image_mu(
    tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """The shift exponent for an image of this many tokens: a line through two points. Defaults are FLUX.1's.

    Raises:
        InputError: the two points are of one number of tokens.
    """
    if base_tokens == max_tokens:
        raise InputError(f"image_mu: base_tokens={base_tokens} is max_tokens, and two numbers make a line: change one")
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return tokens * slope + (base_shift - slope * base_tokens)


def fitted_mu(tokens: int, steps: int) -> float:
    """The shift exponent of FLUX.2, fitted to what looked best.

    Lines through the number of tokens for 10 and for 200 steps, and between them a line through the number of steps;
    above 4,300 tokens that for 200 steps whatever the number.
    """
    few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return many
    slope = (many - few) / 190.0
    return slope * steps + (many - 200.0 * slope)


def image_levels(steps: int) -> np.ndarray:
    """Noise levels before the shift as the pipelines of FLUX and Qwen-Image give them to `euler`."""
    return np.linspace(1.0, 1 / steps, steps)


def wan_levels(steps: int) -> np.ndarray:
    """Noise levels before the shift as the Wan repositories have them, for `unipc`: from 0.999 towards 0."""
    return np.linspace(float(np.float32(1 - 1 / TRAIN_STEPS)), 0.0, steps + 1)[:-1]


def too_few_steps(steps: object) -> list[str]:
    """What is wrong with a number of steps."""
    wrong = not_whole(steps=steps)
    return wrong if wrong or steps >= 1 else [f"steps={steps} is not at least 1: change it"]  # type: ignore[operator]


def _check(name: str, steps: int, shift: float, mu: float | None, levels: Sequence[float] | np.ndarray | None) -> None:
    problems = too_few_steps(steps)
    if not 0 < shift < math.inf:
        problems.append(f"shift={shift} is not above 0 and finite: use 1 for none")
    if mu is not None and shift != 1.0:
        problems.append(f"shift={shift} and mu={mu} were both given: give one of them")
    if mu is not None and not abs(mu) <= MOST_MU:
        problems.append(f"mu={mu} is not from -{MOST_MU} to {MOST_MU}: change the shift that it comes from")
    if levels is not None and len(levels) != steps:
        problems.append(f"levels: {len(levels)} were given for steps={steps}: give one for each step")
    fail_if(problems, f"sampling.{name}")


def _shifted(levels: np.ndarray, shift: float, mu: float | None, curve: Curve = "exponential") -> np.ndarray:
    """Levels moved towards noise, in their dtype, by a factor of level / (1 - level): the shift, exp(mu), or mu."""
    if mu is None:
        return shift * levels / (1 + (shift - 1) * levels)
    factor = math.exp(mu) if curve == "exponential" else mu
    return factor / (factor + (1 / levels - 1))


def _stretched(levels: np.ndarray, last: float | None) -> np.ndarray:
    """Levels stretched so that the last one is `last` and level 1 stays, which is all there is where steps=1."""
    return levels if last is None or levels[-1] == 1 else 1 - (1 - levels) / ((1 - levels[-1]) / (1 - last))


@runtime_checkable
class Sampler(Protocol):
    """What `run` runs. `timesteps` are what the model is told, one for each step; largest first."""

    @property
    def timesteps(self) -> Host: ...

    def init(self, sample: Float[Host, "*shape"]) -> PyTree:
        """What a step hands to the next one, before the first."""
        ...

    def step(
        self,
        index: int | Int[Array, ""],
        state: PyTree,
        sample: Float[Host, "*shape"],
        velocity: Float[Host, "*shape"],
    ) -> tuple[PyTree, Float[Array, "*shape"]]:
        """State and sample after step `index`, from those before it and the model's velocity there.

        Computes in float32; the sample keeps its dtype.
        """
        ...


def _wide(sample: Host) -> jnp.dtype:
    return np.promote_types(sample.dtype, np.float32)


class Euler(eqx.Module):
    """x' = x + (next level - level) * velocity. A step hands nothing on.

    Attributes:
        levels: noise levels, from the first step's to 0 after the last.
        timesteps: float32.
    """

    levels: Host
    timesteps: Host

    def init(self, sample: Float[Host, "*shape"]) -> tuple[()]:
        return ()

    def step(
        self,
        index: int | Int[Array, ""],
        state: tuple[()],
        sample: Float[Host, "*shape"],
        velocity: Float[Host, "*shape"],
    ) -> tuple[tuple[()], Float[Array, "*shape"]]:
        wide, change = _wide(sample), jnp.asarray(self.levels[1:] - self.levels[:-1])
        return state, (sample.astype(wide) + change[index] * velocity.astype(wide)).astype(sample.dtype)


def euler(
    steps: int,
    *,
    shift: float = 1.0,
    mu: float | None = None,
    curve: Curve = "exponential",
    last: float | None = None,
    levels: Sequence[float] | np.ndarray | None = None,
) -> Euler:
    """Euler's method over shifted levels.

    Args:
        steps: how many.
        shift: moves the levels towards noise.
        mu: the same by exp(mu), for shifts that depend on the resolution (`image_mu`, `fitted_mu`).
        curve: "linear" shifts by mu itself.
        last: level of the last step, to which the others are stretched (Qwen-Image: 0.02).
        levels: levels before the shift, one for each step; evenly spaced if None. As in diffusers, the ends of the
            latter are shifted themselves, so that `shift` moves the low end twice.

    Raises:
        InputError: steps or shift out of range; shift and mu together; another number of levels than steps; an unknown
            curve, or a linear one that mu, not above 0, turns round.
    """
    _check("euler", steps, shift, mu, levels)
    problems = [] if curve in ("exponential", "linear") else [f"curve={curve!r}: use 'exponential' or 'linear'"]
    if curve == "linear" and mu is not None and not mu > 0:
        problems.append(f"mu={mu} is not above 0, as a linear curve needs it: change it")
    fail_if(problems, "sampling.euler")
    if levels is None:
        ends = _shifted(np.array([TRAIN_STEPS, 1], np.float32) / np.float32(TRAIN_STEPS), shift, None)
        first, final = (float(end) * TRAIN_STEPS for end in ends)
        base = np.linspace(first, final, steps) / TRAIN_STEPS
    else:
        base = np.asarray(levels, np.float32)
    shifted = _stretched(_shifted(base, shift, mu, curve), last).astype(np.float32)
    return Euler(levels=np.append(shifted, np.float32(0)), timesteps=shifted * np.float32(TRAIN_STEPS))


class UniPCState(NamedTuple):
    """What a step of UniPC hands on: the corrected sample that it started from, and the predictions of the data."""

    start: Float[Array, "..."]
    data: Float[Array, "order ..."]  # newest first; zeros where there were none yet


class UniPC(eqx.Module):
    """UniPC-p of the kind B2, predicting data: each step corrects the sample it gets, then predicts the next.

    With m_i = x - level_i * velocity the prediction of the data at step i, both are sums of samples and of differences
    between predictions, with the numbers in the rows of these tables (`_update` says where they come from):

        c_i = this * x + start * c_{i-1} + base * m_{i-1} + new * (m_i - m_{i-1}) + older * (m_{i-1-k} - m_{i-1})
        x' = start * c_i + base * m_i + older * (m_{i-k} - m_i)

    Attributes:
        levels: noise levels, from the first step's to 0 after the last.
        timesteps: whole numbers.
        corrector: for each step: this, start, base, new, older (order - 1 numbers).
        predictor: for each step: start, base, older.
        order: how many predictions a step uses.
    """

    levels: Host
    timesteps: Host
    corrector: Host
    predictor: Host
    order: int = eqx.field(static=True)

    def init(self, sample: Float[Host, "*shape"]) -> UniPCState:
        start = jnp.zeros_like(sample, _wide(sample))
        return UniPCState(start, jnp.zeros((self.order, *sample.shape), start.dtype))

    def step(
        self,
        index: int | Int[Array, ""],
        state: UniPCState,
        sample: Float[Host, "*shape"],
        velocity: Float[Host, "*shape"],
    ) -> tuple[UniPCState, Float[Array, "*shape"]]:
        wide = _wide(sample)
        level, fix, go = (jnp.asarray(table)[index] for table in (self.levels, self.corrector, self.predictor))
        x = sample.astype(wide)
        now, before = x - level * velocity.astype(wide), state.data[0]
        start = fix[0] * x + fix[1] * state.start + fix[2] * before + fix[3] * (now - before)
        start = start + _older(fix[4:], state.data)
        data = jnp.concatenate([now[None], state.data[:-1]])
        after = go[0] * start + go[1] * now + _older(go[2:], data)
        return UniPCState(start, data), after.astype(sample.dtype)


def _older(weights: Float[Array, " older"], data: Float[Array, "order ..."]) -> Float[Array, "..."] | int:
    """The weighted differences of older predictions from the newest; no product of matrices, which TPUs round."""
    return sum(weights[k] * (data[k + 1] - data[0]) for k in range(len(weights)))


def unipc(
    steps: int,
    *,
    shift: float = 1.0,
    mu: float | None = None,
    order: int = 2,
    levels: Sequence[float] | np.ndarray | None = None,
) -> UniPC:
    """UniPC over shifted levels, of lower order in the first and the last steps.

    Args:
        steps: how many.
        shift: moves the levels towards noise (Wan: 3 for 480p and 5 for 720p; 12 for text to video of Wan2.2 A14B).
        mu: the same by exp(mu).
        order: how many predictions of the data a step uses, 1 to 3.
        levels: levels before the shift, one for each step; as in diffusers if None, from 1 towards 0.001.

    Raises:
        InputError: steps, shift or order out of range; shift and mu together; another number of levels than steps.
    """
    _check("unipc", steps, shift, mu, levels)
    fail_if([] if order in (1, 2, 3) else [f"order={order} is not 1, 2 or 3: change it"], "sampling.unipc")
    base = np.linspace(1, 1 / TRAIN_STEPS, steps + 1)[:-1] if levels is None else np.asarray(levels, np.float64)
    shifted = _shifted(base, shift, mu)
    if abs(shifted[0] - 1) < CLOSE_TO_NOISE:
        shifted[0] -= CLOSE_TO_NOISE
    stored = np.append(shifted, 0.0).astype(np.float32)
    orders = [min(order, i + 1, steps - i) for i in range(steps)]
    corrector, predictor = np.zeros((steps, 3 + order)), np.zeros((steps, 1 + order))
    corrector[0, 0] = 1
    for i, used in enumerate(orders):
        predictor[i] = _update(stored, i, used, order, corrects=False)
        if i:
            corrector[i, 1:] = _update(stored, i - 1, orders[i - 1], order, corrects=True)
    return UniPC(
        levels=stored,
        timesteps=(shifted * TRAIN_STEPS).astype(np.int64),
        corrector=corrector.astype(np.float32),
        predictor=predictor.astype(np.float32),
        order=order,
    )


def _update(levels: np.ndarray, i: int, used: int, order: int, *, corrects: bool) -> np.ndarray:
    """Weights of one update from level i to level i + 1: start, base, [new,] older.

    In l = log((1 - s) / s) the exact step is a sum over derivatives of the data's prediction; UniPC takes them from
    differences D_k = (m_{i-k} - m_i) / r_k over the steps' sizes r_k in l, relative to this one, with weights rho that
    solve sum_k rho_k r_k^(n-1) = b_n. A corrector has the step's own end, r = 1, among them. The float32 levels are
    those of the source; the weights are from float64, as small steps lose digits twice over in b.
    """
    s = levels.astype(np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(1 - s) - np.log(s)
    h = logs[i + 1] - logs[i]  # infinite for the last step, which is of order 1
    growth = np.expm1(-h)
    ratios = [(logs[i - k] - logs[i]) / h for k in range(1, used)]
    rho = _weights(h, [*ratios, 1.0] if corrects else ratios)
    found = np.zeros(2 + corrects + order - 1)
    scale = -(1 - s[i + 1]) * growth
    found[:2] = s[i + 1] / s[i], scale
    if corrects:
        found[2] = scale * rho[-1]
    for k, ratio in enumerate(ratios):
        found[2 + corrects + k] = scale * rho[k] / ratio
    return found


def _weights(h: float, ratios: list[float]) -> np.ndarray:
    """rho for a step of size h. A single one is one half, as in the source, which leaves out its exact value."""
    if len(ratios) < 2:
        return np.full(len(ratios), 0.5)
    growth, factorial = np.expm1(-h), 1
    phi, b = growth / -h - 1, []
    for n in range(1, len(ratios) + 1):
        b.append(phi * factorial / growth)
        factorial *= n + 1
        phi = phi / -h - 1 / factorial
    return np.linalg.solve(np.vander(ratios, increasing=True).T, b)


def run(
    sampler: Sampler,
    velocity: Velocity,
    sample: Float[Host, "*shape"],
    state: PyTree = None,
    *,
    first: int = 0,
    stop: int | None = None,
) -> tuple[PyTree, Float[Array, "*shape"]]:
    """State and sample after the steps from `first` to before `stop` (all of them if None), in one `lax.scan`.

    A model that changes on the way runs the first steps with one `velocity`, then the others with another one, from the
    state and sample that it got.

    Raises:
        InputError: steps that the sampler does not have; a later first step without a state.
    """
    steps = len(sampler.timesteps)
    stop = steps if stop is None else stop
    problems = [] if 0 <= first <= stop <= steps else [f"first={first}, stop={stop} are not steps of 0 to {steps}"]
    if first and state is None:
        problems.append(f"first={first} without a state: pass the one that the steps before gave")
    fail_if(problems, "sampling.run")

    def body(carry: Any, now: tuple[Array, Array]) -> tuple[Any, None]:
        (state, sample), (index, timestep) = carry, now
        return sampler.step(index, state, sample, velocity(sample, timestep)), None

    state = sampler.init(sample) if state is None else state
    each = jnp.arange(first, stop), jnp.asarray(sampler.timesteps[first:stop].astype(_narrow(sampler.timesteps)))
    return lax.scan(body, (state, sample), each)[0]


def run_stepwise(
    sampler: Sampler,
    velocity: Callable[..., Array],
    given: Sequence[PyTree],
    sample: Float[Host, "*shape"],
    state: PyTree = None,
    *,
    first: int = 0,
    stop: int | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[PyTree, Float[Array, "*shape"]]:
    """As `run`, by one jitted step after another, so that a caller hears of each.

    Args:
        sampler, sample, state, first, stop: as `run` takes them.
        velocity: pure function `f(*given, sample, timestep)`.
        given: what the velocity takes besides, a model first: arguments of the jitted step.
        on_step: told after each step how many are done, and how many there are.
    """
    step = jax.jit(lambda given, i, now, state, x: sampler.step(i, state, x, velocity(*given, x, now)))
    total, x = len(sampler.timesteps), jnp.asarray(sample)
    state = sampler.init(sample) if state is None else state
    for i in range(first, total if stop is None else stop):
        state, x = step(given, np.int32(i), sampler.timesteps[i], state, x)
        if on_step is not None:
            jax.block_until_ready(x)
            on_step(i + 1, total)
    return state, x


def _narrow(timesteps: Host) -> np.dtype:
    return np.dtype(np.int32) if timesteps.dtype.kind == "i" else np.dtype(np.float32)


def high_noise_steps(sampler: Sampler, boundary: float) -> int:
    """How many steps the expert for high noise takes, before the other one: those at `boundary` (of 1) or above.

    Timesteps fall, so that the experts change once. Wan2.2: 0.875 (text to video), 0.9 (image to video).
    """
    return int(np.sum(sampler.timesteps >= boundary * TRAIN_STEPS))


def guided(
    velocity: Callable[[Host, Host, PyTree], Array],
    wanted: PyTree,
    unwanted: PyTree,
    scale: float | Num[Array, ""],
    *,
    together: bool = False,
) -> Velocity:
    """Classifier-free guidance: u + scale * (w - u), in float32, of the velocities under two conditions.

    Args:
        velocity: of a sample at a timestep under a condition.
        wanted, unwanted: the two conditions, alike in shape, each array with the batch first.
        scale: of the guidance; 1 is `wanted` alone, at twice the price.
        together: one call with twice the batch instead of two calls.
    """

    def f(sample: Host, timestep: Host) -> Array:
        if together:
            both = jax.tree.map(lambda w, u: jnp.concatenate([w, u]), wanted, unwanted)
            time = jnp.concatenate([timestep] * 2) if jnp.ndim(timestep) else timestep
            w, u = jnp.split(velocity(jnp.concatenate([sample] * 2), time, both), 2)
        else:
            w, u = (velocity(sample, timestep, condition) for condition in (wanted, unwanted))
        w, u = (x.astype(_wide(x)) for x in (w, u))
        return u + scale * (w - u)

    return f
