"""A whole step of training on random tokens: forward, backward and the optimizer's update."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness.calls import Program, compiled
from reformax import devices
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib

IN_A_ROW = 10  # steps
MASKED = 0.15  # the share of tokens that a masked language model fills in


class Shape(NamedTuple):
    """A Transformer whose feed-forward layers are four times as wide, and the tokens of a step."""

    d_model: int
    n_layers: int
    n_heads: int
    batch: int
    length: int
    vocab_size: int
    masked: bool  # a masked language model, which sees whole rows
    padded: bool = False  # rows end in padding; their lengths lie between half a row and a row
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """Positions of a step, padding included."""
        return self.batch * self.length

    @property
    def flop(self) -> int:
        """Operations of a step's products; causal attention counts half."""
        head = self.vocab_size + (self.d_model if self.masked else 0)
        matrices = 12 * self.n_layers * self.d_model**2 + head * self.d_model
        attention = (12 if self.masked else 6) * self.n_layers * self.d_model * self.length
        return self.tokens * (6 * matrices + attention)

    def rates(self, seconds: float) -> tuple[float, float]:
        """Tokens/s and TFLOP/s of a step that takes so long."""
        return self.tokens / seconds, self.flop / seconds / 1e12

    def checked(self, first_loss: float) -> float:
        """The loss of a first step, in nats; `ArithmeticError` if it is not that of a guess."""
        guess = math.log(self.vocab_size)
        if not abs(first_loss - guess) < 1:
            raise ArithmeticError(f"first loss {first_loss:.3f}, expected about {guess:.3f}")
        return first_loss


class TrainingStep:
    """A step of a model on the first device, the state that it changes, and its times.

    Attributes:
      program: the compiled step.
      first_loss: of the first step, in nats.
      seconds: of a step, in each turn.
    """

    program: Program
    first_loss: float
    seconds: list[float]

    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        shape: Shape,
        accumulate: int = 1,
    ):
        """Traces the step. The first state is made after it is compiled, which takes memory too."""
        mesh, size = mesh_lib.make({}, jax.devices()[:1]), (shape.batch, shape.length)
        self.shape, self.seconds, self._key = shape, [], jax.random.PRNGKey(0)
        init = step_lib.init_fn(model, optimizer, size, ema=False)
        whole = devices.replicated(mesh)
        self._init = step_lib.jit_once(init, out_shardings=whole)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(init, self._key),
        )
        of_tokens, of_targets, of_weights, of_lengths = jax.random.split(self._key, 4)
        tokens, targets = (  # 0 would be padding
            jax.random.randint(k, size, 1, shape.vocab_size) for k in (of_tokens, of_targets)
        )
        counted = jax.random.bernoulli(of_weights, MASKED if shape.masked else 1.0, size)
        if shape.padded:
            lengths = jax.random.randint(
                of_lengths, (shape.batch, 1), shape.length // 2, shape.length + 1
            )
            exists = jnp.arange(shape.length) < lengths
            tokens, counted = jnp.where(exists, tokens, 0), counted & exists
        batch = (tokens, targets, counted.astype(jnp.float32))
        self._batch = jax.device_put(batch, devices.over_tokens(mesh))
        step = step_lib.step_fn(model, optimizer, mesh, accumulate=accumulate)
        self._lowered = step.lower(state, self._batch, self._key)

    def compile(self) -> TrainingStep:
        self.program = compiled(self._lowered)
        return self

    def warm_up(self) -> TrainingStep:
        """The first step; `ArithmeticError` if its loss is not that of a guess."""
        self._state = self._init(self._key)
        self.first_loss = self.shape.checked(self.take(1))
        return self

    def turn(self) -> TrainingStep:
        """Notes the mean time of `IN_A_ROW` steps, after two that warm the device."""
        if self._state is None:
            self._state = self._init(self._key)
        self.take(2)
        start = time.perf_counter()
        self.take(IN_A_ROW)
        self.seconds.append((time.perf_counter() - start) / IN_A_ROW)
        return self

    def release(self) -> TrainingStep:
        """Frees the state, so that another step's fits; the next turn begins with a first one."""
        self._state = None
        return self

    def take(self, n: int) -> float:
        """Takes `n` steps: the loss of the last, in nats; `ArithmeticError` if it is not finite."""
        for _ in range(n):
            self._state, metrics = self.program.call(self._state, self._batch, self._key)
        nats = float(jax.block_until_ready((metrics, self._state))[0]["nats"].mean)
        if not math.isfinite(nats):
            raise ArithmeticError(f"the loss of a step is {nats}")
        return nats
