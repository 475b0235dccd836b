"""Trains a model of one's own, written in flax, with an attention of reformax in it.

python examples/train_flax.py --steps=300

A `TaskModel` has four things that the step and the evaluation ask for: `vocab_size`, `init_params`,
`features` and `logits`. Here they are made of an nnx module; the loop is that of train_minimal.py.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx
from train_minimal import fit

from reformax.data import stdlib
from reformax.flax.nnx import Attention
from reformax.ops import lsh
from reformax.task import TaskModel


class Block(nnx.Module):
    """Attention and a hidden layer, each added to its input."""

    def __init__(self, d_model: int, rngs: nnx.Rngs):
        op = lsh.lsh(n_hashes=2)
        self.attention = Attention(op, num_heads=4, in_features=d_model, causal=True, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(d_model, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(d_model, 4 * d_model, rngs=rngs)
        self.down = nnx.Linear(4 * d_model, d_model, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Network(nnx.Module):
    """Embeddings, positions and blocks."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int, length: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocab_size, d_model, rngs=rngs)
        self.positions = nnx.Embed(length, d_model, rngs=rngs)
        self.blocks = nnx.List([Block(d_model, rngs) for _ in range(n_layers)])
        self.norm = nnx.RMSNorm(d_model, rngs=rngs)
        self.head = nnx.Linear(d_model, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]  # each position predicts its own token
        x = self.embedding(shifted) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Model(TaskModel):
    """The network as the step and the evaluation call it: functions of its parameters."""

    def __init__(self, vocab_size: int, **sizes):
        self.vocab_size, self._sizes = vocab_size, sizes

    def _network(self, key) -> Network:
        return Network(self.vocab_size, **self._sizes, rngs=nnx.Rngs(key))

    def init_params(self, rng, shape):
        del shape
        return nnx.to_pure_dict(nnx.state(self._network(rng), nnx.Param))

    def _at(self, params, rng) -> Network:
        network = self._network(jax.random.PRNGKey(0) if rng is None else rng)
        state = nnx.state(network, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        nnx.update(network, state)
        return network

    def features(self, params, tokens, rng=None):
        return self._at(params, rng)(tokens)

    def logits(self, params, features):
        return self._at(params, None).head(features)


def main(steps: int = 300, batch_size: int = 8, length: int = 256, d_model: int = 128) -> float:
    """Trains and evaluates; returns the bits per byte of held-out text."""
    task = stdlib.stdlib(max_bytes=2_000_000)
    model = Model(task.vocab_size, d_model=d_model, n_layers=2, length=length)
    return fit(model, model, task, steps, batch_size, length)[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
