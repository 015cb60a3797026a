"""A small language model and its training step, on any mesh: what the tests of training state run."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardzoo import checkpoints, zoo
from shardzoo.zoo import families, optimizer_state
from shardzoo.zoo.layout import Param, place, split_at_rest, stack
from shardzoo.zoo.mesh import TP, Degrees

BATCH, SEQ = 8, 8

# (degrees, FSDP): 1 to 8 devices
MESHES = [
    ({}, False),
    ({"data": 2}, False),
    ({"data": 2}, True),
    ({"tensor": 2}, False),
    ({"context": 2}, False),
    ({"pipe": 2}, False),
    ({"data": 4}, True),
    ({"data": 4}, False),
    ({"tensor": 4}, False),
    ({"data": 2, "tensor": 2}, True),
    ({"data": 2, "context": 2}, True),
    ({"pipe": 2, "tensor": 2}, False),
    ({"pipe": 4}, False),
    ({"data": 8}, True),
    ({"data": 8}, False),
    ({"tensor": 8}, False),
    ({"context": 8}, False),
    ({"data": 2, "tensor": 4}, True),
    ({"data": 4, "tensor": 2}, True),
    ({"data": 2, "pipe": 2, "tensor": 2}, True),
    ({"pipe": 4, "tensor": 2}, False),
    ({"data": 2, "context": 2, "tensor": 2}, True),
    ({"data": 2, "pipe": 2, "context": 2}, False),
    ({"context": 2, "tensor": 4}, False),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyTrainingConfig:
    layers: int = 4
    embed: int = 32
    mlp: int = 64
    vocab: int = 64


class Block(eqx.Module):
    norm: Any
    up: Any
    down: Any

    @classmethod
    def declare(cls, c):
        return cls(
            norm=Param("embed", (c.embed,)),
            up=Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}),
            down=Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}),
        )


class ToyLanguageModel(eqx.Module):
    embed: Any
    blocks: Block
    head: Any
    config: ToyTrainingConfig = eqx.field(static=True)

    @classmethod
    def declare(cls, c):
        return cls(
            embed=Param("vocab embed", (c.vocab, c.embed), {"vocab": TP}),
            blocks=stack(Block.declare(c), c.layers, axis="pipe"),
            head=Param("vocab embed", (c.vocab, c.embed), {"vocab": TP}),
            config=c,
        )


families.register(families.Family("toy-training", ToyTrainingConfig, ToyLanguageModel.declare))


def declare(degrees=None, fsdp=False, config=None):
    """The declaration, split at rest over `data` if `fsdp`."""
    declared = ToyLanguageModel.declare(config or ToyTrainingConfig())
    return split_at_rest(declared, "data", Degrees(**(degrees or {})), smallest=64) if fsdp else declared


def adamw(**options):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 200)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-4, **options))


def loss_of(model, tokens, key):
    """Next-token cross entropy, with a little noise so that the key matters; global arrays on any mesh."""
    x = model.embed[tokens[:, :-1]]
    x = x + 0.05 * jax.random.normal(key, x.shape)

    def block(x, b):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * b.norm
        return x + jnp.tanh(h @ b.up.T) @ b.down.T, None

    x, _ = jax.lax.scan(block, x, model.blocks)
    logits = jax.nn.log_softmax(x @ model.head.T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


class Run:
    """A run on one mesh: its declarations, its first state and its compiled step."""

    def __init__(self, degrees, fsdp=False, *, optimizer=None, trainable=None, config=None, mesh=None):
        self.mesh = mesh or zoo.make_mesh(**degrees)
        self.declared = declare(degrees, fsdp, config)
        self.optimizer, self.trainable = optimizer or adamw(), trainable
        self.declared_state = optimizer_state.declare(self.optimizer, self.declared, trainable=trainable)
        self._step = self._compile()

    def first(self):
        rng = np.random.default_rng(0)
        values = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32) * 0.3, self.declared)
        model = place(self.declared, self.mesh, values)
        opt_state = optimizer_state.init(self.optimizer, model, self.declared, self.mesh, trainable=self.trainable)
        whole = NamedSharding(self.mesh, PartitionSpec())
        step, key = jax.jit(lambda: (jnp.int32(0), jax.random.key(7)), out_shardings=whole)()
        return checkpoints.TrainingState(model=model, opt_state=opt_state, step=step, key=key, data={"examples": 0})

    def _compile(self):
        part = functools.partial(optimizer_state.trainable_part, trainable=self.trainable)

        def step(state, tokens):
            key, used = jax.random.split(state.key)
            loss, grads = jax.value_and_grad(loss_of)(state.model, tokens, used)
            updates, opt_state = self.optimizer.update(part(grads), state.opt_state, part(state.model))
            given = jax.tree.map(lambda p, u: p + u, part(state.model), updates)
            model = eqx.combine(given, state.model)
            after = dataclasses.replace(state, model=model, opt_state=opt_state, step=state.step + 1, key=key)
            return after, loss

        whole = NamedSharding(self.mesh, PartitionSpec())
        lie = lambda declared: jax.tree.map(lambda p: p.sharding(self.mesh), declared)  # noqa: E731
        state = checkpoints.TrainingState(
            model=lie(self.declared), opt_state=lie(self.declared_state), step=whole, key=whole, data=None
        )
        return jax.jit(step, donate_argnums=0, out_shardings=(state, whole))

    def step(self, state):
        """One step; returns the state, the loss and the numbers of the examples it took."""
        at = state.data["examples"]
        tokens = np.stack([example(at + i) for i in range(BATCH)])
        sharding = NamedSharding(self.mesh, PartitionSpec("data"))
        tokens = jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
        state, loss = self._step(dataclasses.replace(state, data=None), tokens)
        loss = float(np.asarray(loss.addressable_data(0)))
        return dataclasses.replace(state, data={"examples": at + BATCH}), loss, list(range(at, at + BATCH))

    def training(self, folder, **options):
        """The manager of its saves."""
        options = {"sync": False, "timeout": 60, "trainable": self.trainable, **options}
        return checkpoints.Training(folder, self.declared, self.optimizer, self.mesh, **options)

    def go(self, state, steps):
        """Takes steps; returns the state, the losses and the examples."""
        losses, examples = [], []
        for _ in range(steps):
            state, loss, numbers = self.step(state)
            losses.append(loss)
            examples += numbers
        return state, losses, examples


def example(number):
    """The tokens of one example of the stream: a walk whose steps depend on its number."""
    rng = np.random.default_rng(number)
    return (rng.integers(64) + np.cumsum(rng.integers(1, 4, SEQ + 1))).astype(np.int32) % 64
