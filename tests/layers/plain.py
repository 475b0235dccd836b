"""Stacks of layers written out one after the other, for plain autodiff; and helpers of tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from reformax import layers
from reformax.ops import local, lsh


def init(layer, *shapes, seed=0):
    """Parameters of a layer's names and shapes, none of them at its initial 0 or 1.

    NumPy draws them: XLA would compile for half a second to draw those of one model, and
    `jnp.asarray` a program for each shape.
    """
    rng = np.random.default_rng(seed)

    def draw(path, like):
        name = getattr(path[-1], "key", "")
        # As wide as Glorot and Bengio have it; scales are about 1, biases about 0.
        glorot = np.sqrt(2 / (sum(like.shape[-2:]) or 2))
        width = {"w": glorot, "e": 0.3, "a": 0.3}.get(name[:1], 0.1)
        array = width * rng.normal(size=like.shape) + (name == "scale")
        return jax.device_put(array.astype(like.dtype))

    return jax.tree_util.tree_map_with_path(
        draw, jax.eval_shape(lambda: layer.init_params(jax.random.PRNGKey(seed), *shapes))
    )


def blocks(ops=None, d_head=4, d_ff=12, rate=0.1, ff_chunk_size=0, output_bias=False):
    """A cycle of causal blocks with dropout wherever there can be some."""
    ops = (local.local(chunk_len=4), lsh.lsh(chunk_len=4, n_hashes=2)) if ops is None else ops
    return [
        layers.TransformerBlock(
            layers.Attention(
                op,
                n_heads=2,
                d_qk=d_head,
                d_v=d_head,
                causal=True,
                attention_dropout=rate,
                output_dropout=rate,
                output_bias=output_bias,
                use_rotary=True,
            ),
            layers.FeedForward(d_ff, rate, rate, chunk_size=ff_chunk_size),
        )
        for op in ops
    ]


def layer_norm(params, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 1e-6)
    return (x - mean) / deviation * params["scale"] + params["bias"]


def halves(cycle, n_layers, params, segment_ids, rng):
    """The two residual functions of each layer in turn, `(attention, feed_forward)`.

    Each is compiled once for all repeats of the cycle, which is far less than a program of all
    layers, so that what calls them need not be compiled.
    """
    mask = () if segment_ids is None else (segment_ids,)

    def sublayer(name, i, index):
        """`(weights of all repeats, repeat, x) -> the sublayer's output`."""

        @jax.jit
        def run(params, repeat, x):
            p = jax.tree.map(lambda w: w[repeat], params)
            block_rng = jax.random.fold_in(jax.random.fold_in(rng, repeat), i)
            x = layer_norm(p[f"{name}_norm"], x)
            layer, masks = getattr(cycle[i], name), mask if name == "attention" else ()
            return layer.apply(p[name], x, *masks, rng=jax.random.fold_in(block_rng, index))

        return run

    compiled = [
        [sublayer(name, i, index) for index, name in enumerate(("attention", "feed_forward"))]
        for i in range(len(cycle))
    ]
    for layer in range(n_layers):
        repeat, i = divmod(layer, len(cycle))
        yield [functools.partial(f, params[f"block_{i}"], repeat) for f in compiled[i]]


def reversible(cycle, n_layers, params, x1, x2, segment_ids, rng):
    """Reformer, eq. 9, for each layer."""
    for attention, feed_forward in halves(cycle, n_layers, params, segment_ids, rng):
        x1 = x1 + attention(x2)
        x2 = x2 + feed_forward(x1)
    return x1, x2


def residual(cycle, n_layers, params, x, segment_ids, rng):
    for attention, feed_forward in halves(cycle, n_layers, params, segment_ids, rng):
        x = x + attention(x)
        x = x + feed_forward(x)
    return x


def slotted(cycle, n_layers, params, x, segment_ids, rng, n_slots):
    """Each sublayer reads the stream less its slot, and adds to both."""
    slots = [0] * n_slots
    sublayers = [f for pair in halves(cycle, n_layers, params, segment_ids, rng) for f in pair]
    for i, sublayer in enumerate(sublayers):
        out = sublayer(x - slots[i % n_slots])
        x, slots[i % n_slots] = x + out, slots[i % n_slots] + out
    return x


def some_segments(batch, length):
    """Two packed sequences and padding in the first row, a single sequence in the others."""
    segment_ids = np.ones((batch, length), np.int32)
    segment_ids[0, length // 3 :] = 2
    segment_ids[0, -2:] = 0
    return segment_ids


def assert_decodes(layer, params, x, lengths, whole, rng):
    """Prompts of two lengths, then step by step, give the rows of `whole`; returns the cache."""
    prompt, rows, n_steps = x[:, : max(lengths)], np.arange(len(x)), x.shape[1] - max(lengths)
    prefill = jax.jit(
        lambda x, lengths: layer.prefill(params, x, lengths, x.shape[1] + n_steps, rng)[:2]
    )
    out, cache = prefill(prompt, lengths)
    out, whole = np.asarray(out), np.asarray(whole)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], whole[row, :length], atol=1e-5)
    merged = jax.jit(lambda params: layer.for_decoding(params, "float32"))(params)
    step = jax.jit(layer.step)
    for position in (lengths + n for n in range(n_steps)):
        out, cache = step(merged, x[rows, position][:, None], cache, position)
        np.testing.assert_allclose(np.asarray(out)[:, 0], whole[rows, position], atol=1e-5)
    return cache
