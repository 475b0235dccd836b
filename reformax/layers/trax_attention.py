"""Trax's SelfAttention and LSHSelfAttention over reformax's ops: same arguments, same weights.

For models that Trax assembles, as `trax.models.ReformerLM(attention_type=LSHSelfAttention)`, and
for weights that were trained there. The layers compute what Trax's of the same name do (its file
`layers/research/efficient_attention.py`), for any length, with these differences:

  * `masked=True`: padding gives nothing to anyone, and its own rows are zeros. In Trax padding at
    positions 0 and 1 is seen, and rows of padding hold some average of the tokens' values.
  * Attention dropout drops each weight on its own; in Trax chunks, heads and examples share a mask.
  * LSHSelfAttention has working biases, and rejects `share_qk=False`.
  * There is no `mode="predict"`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from reformax.layers._trax import Layer
from reformax.layers.attention import QKV, Attention
from reformax.layers.dropout import check_rate, dropout
from reformax.ops import dense, local, lsh, shared_qk
from reformax.ops.base import AttentionOp
from reformax.ops.parts import hashing, sorting
from reformax.ops.parts.chunked import in_a_circle

# What Trax scores a position's own key with, and hides it by.
SELF_SCORE = -1e5


class _TraxAttention(Layer):
    """What the two layers share: Trax's weights and its protocols, and a loop over blocks.

    Weights: `(w_q, w_k, w_v, w_o)`, with `bias` then `(b_q, b_k, b_v)`, shapes as in `Attention`;
    without `w_k` and `b_k` where queries and keys are shared. State: a tuple of arrays with one row
    for each pair of an example and a head, heads running faster.
    """

    def __init__(
        self,
        op: AttentionOp,
        *,
        n_heads,
        d_qk,
        d_v,
        causal,
        masked,
        bias,
        mode,
        attention_dropout,
        output_dropout,
        n_parallel_heads,
        use_python_loop,
        use_reference_code,
    ):
        super().__init__(n_in=2 if masked else 1)
        if mode == "predict":
            raise NotImplementedError(
                f"mode='predict': {self.name} does not decode step by step; use mode='eval'"
            )
        for name, value in (
            ("use_python_loop", use_python_loop),
            ("use_reference_code", use_reference_code),
        ):
            if value:
                raise NotImplementedError(
                    f"{name}={value!r}: {self.name} has one implementation; leave it False"
                )
        if n_parallel_heads and n_parallel_heads % n_heads and n_heads % n_parallel_heads:
            raise ValueError(
                f"n_parallel_heads is {n_parallel_heads}: expected a multiple or a divisor of "
                f"n_heads={n_heads}, or None"
            )
        self._attention = Attention(
            op,
            n_heads=n_heads,
            d_qk=d_qk,
            d_v=d_v,
            causal=causal,
            masked=masked,
            bias=bias,
            attention_dropout=attention_dropout,
            mode=mode,
        )
        letters = "qv" if op.traits.shared_qk else "qkv"
        self._names = (*(f"w_{x}" for x in letters), "w_o") + (
            tuple(f"b_{x}" for x in letters) if bias else ()
        )
        self._random_plan = op.traits.random_plan
        self._n_heads = n_heads
        self._d_qk = d_qk
        self._d_v = d_v
        self._causal = causal
        self._masked = masked
        self._bias = bias
        self._mode = mode
        self._attention_dropout = attention_dropout
        self._output_dropout = check_rate("output_dropout", output_dropout)
        self._n_parallel_heads = n_parallel_heads

    def init_params(self, rng, shape, mask_shape=None) -> tuple[jax.Array, ...]:
        params = self._attention.init_params(rng, shape)
        return tuple(params[name] for name in self._names)

    def init_weights_and_state(self, input_signature) -> None:
        super().init_weights_and_state(input_signature)
        batch, length = (input_signature[0] if self._masked else input_signature).shape[:2]
        self.state = self._init_state(self.rng, batch, length)

    def apply(self, params, *inputs, rng=None):
        """Attention as a pure function; what the state would hold is drawn from `rng`."""
        inputs = inputs if self._masked else inputs[0]
        batch, length = (inputs[0] if self._masked else inputs).shape[:2]
        dropout_rates = self._attention_dropout, self._output_dropout
        if rng is None and (self._random_plan or (self._mode == "train" and any(dropout_rates))):
            raise ValueError(f"rng is None: {self} needs one, such as jax.random.PRNGKey(0)")
        return self._attend(inputs, params, self._init_state(rng, batch, length), rng, True)[0]

    def forward(self, inputs):
        output, self.state = self._attend(inputs, self.weights, self.state, self.rng, True)
        return output

    def forward_and_or_backward(
        self,
        inputs,
        weights,
        state,
        rng,
        output_grad=None,
        compute_output: bool = True,
        update_state: bool = True,
    ) -> tuple[Any, Any, Any, Any]:
        """What Trax's reversible layers call: attention and its gradient, in one pass.

        Args:
          inputs, weights, state, rng: as the forward pass had them, but the state it left behind.
          output_grad: the gradient of the loss with respect to the output; None asks for none.
          compute_output: whether to return the output.
          update_state: False attends as the forward pass that left this state did.

        Returns:
          `(output, new state, gradient of inputs, gradient of weights)`, None for what is not
          asked for.
        """

        def attend(inputs, weights):
            return self._attend(inputs, weights, state, rng, update_state)

        inputs_grad = weights_grad = None
        if output_grad is None:
            output, state = attend(inputs, weights)
        else:
            output, vjp, state = jax.vjp(attend, inputs, weights, has_aux=True)
            inputs_grad, weights_grad = vjp(output_grad)
        return (
            output if compute_output else None,
            state if update_state else None,
            inputs_grad,
            weights_grad,
        )

    def _attend(self, inputs, weights, state, rng, update_state):
        """`(output, new state)`, `n_parallel_heads` pairs of an example and a head at a time."""
        x, mask = inputs if self._masked else (inputs, None)
        segments = None if mask is None else (mask != 0).astype(jnp.int32)
        attend_rng, output_rng = (None, None) if rng is None else jax.random.split(rng)

        def block(x, segments, weights, state, rng):  # some examples, some heads
            params = dict(zip(self._names, weights, strict=True), op=())
            projections = self._attention.project(params, x)
            plan, state = self._plan(projections, segments, state, update_state)
            return self._attention.attend(params, projections, plan, segments, rng), state

        n_examples, n_heads = x.shape[0], self._n_heads
        n_parallel = min(self._n_parallel_heads or n_examples * n_heads, n_examples * n_heads)
        examples, heads = max(1, n_parallel // n_heads), min(n_parallel, n_heads)
        if n_examples % examples:
            raise ValueError(
                f"n_parallel_heads is {self._n_parallel_heads}, {examples} examples at a time: "
                f"expected a divisor of the batch, {n_examples}"
            )
        if any(s.shape[0] != n_examples * n_heads for s in state):
            raise ValueError(
                f"the input has batch {n_examples}, but the state is for "
                f"{state[0].shape[0] // n_heads}: initialise the layer for this batch"
            )
        state = _reshape(state, 1, n_examples, n_heads)
        if (examples, heads) == (n_examples, n_heads):
            out, state = block(x, segments, weights, state, attend_rng)
        else:
            n_blocks = n_examples // examples, n_heads // heads
            x, segments = _reshape((x, segments), 1, n_blocks[0], examples)
            weights = _reshape(weights, 1, n_blocks[1], heads)
            state = _reshape(state, 2, n_blocks[0], examples, n_blocks[1], heads)
            state = jax.tree.map(lambda s: jnp.swapaxes(s, 1, 2), state)
            rngs = None if rng is None else jax.random.split(attend_rng, n_blocks)

            def some_examples(args):
                x, segments, state, rngs = args

                @jax.checkpoint  # else the gradient would hold every block's queries and values
                def add_heads(total, args):
                    out, state = block(x, segments, *args)
                    return total + out, state

                return jax.lax.scan(add_heads, jnp.zeros_like(x), (weights, state, rngs))

            out, state = jax.lax.map(some_examples, (x, segments, state, rngs))
            out = out.reshape(n_examples, *out.shape[2:])
            state = jax.tree.map(lambda s: jnp.swapaxes(s, 1, 2), state)
            state = _reshape(state, 4, n_examples, n_heads)
        if self._mode == "train":
            out = dropout(out, self._output_dropout, output_rng, shared_axes=(0, 1))
        return out, _reshape(state, 2, n_examples * n_heads)

    def _init_state(self, rng, batch: int, length: int) -> tuple[jax.Array, ...]:
        """The state of a fresh layer."""
        raise NotImplementedError

    def _plan(self, projections: QKV, segments, state, update: bool):
        """The op's plan for a block, and the block's new state, `[examples, heads, ...]`."""
        raise NotImplementedError


def _reshape(tree, n_axes: int, *sizes: int):
    """Each array of a tree with its first `n_axes` axes split or joined to `sizes`."""
    return jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[n_axes:]), tree)


class SelfAttention(_TraxAttention):
    """`trax.layers.SelfAttention`: dense, or within chunks if `chunk_len` is set.

    `[B, T, D] -> [B, T, D]`; with `masked` a second input `[B, T]` that is True for tokens.
    """

    def __init__(
        self,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        share_qk: bool = False,
        causal: bool = False,
        masked: bool = False,
        chunk_len: int | None = None,
        n_chunks_before: int = 0,
        n_chunks_after: int = 0,
        bias: bool = False,
        mode: str = "train",
        predict_mem_len: int | None = None,
        predict_drop_len: int | None = None,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        n_parallel_heads: int | None = None,
        use_python_loop: bool = False,
        use_reference_code: bool = False,
    ):
        """Args:
        n_heads: number of heads.
        d_qk: size of a head's queries and keys.
        d_v: size of a head's values.
        share_qk: whether keys are the length-normalised queries.
        causal: whether the future is hidden.
        masked: whether a mask comes as a second input.
        chunk_len: positions in a chunk; None attends to the whole sequence.
        n_chunks_before: how many chunks before its own a position sees.
        n_chunks_after: how many after it.
        bias: whether queries, keys and values have biases.
        mode: "train" or "eval", which has no dropout.
        predict_mem_len: of use to Trax's mode "predict" alone.
        predict_drop_len: the same.
        attention_dropout: the rate on attention weights.
        output_dropout: the rate on the features of the output, the same ones at all positions.
        n_parallel_heads: how many pairs of an example and a head to compute at a time: fewer need
          less memory; None is all of them. A multiple or a divisor of `n_heads`.
        use_python_loop: False; Trax's choice of implementation.
        use_reference_code: False; the same.

        Raises:
          NotImplementedError: an option of Trax that this layer does not have.
          ValueError: a value out of range.
        """
        del predict_mem_len, predict_drop_len
        if chunk_len is not None:
            op = local.local(
                chunk_len=chunk_len,
                n_chunks_before=n_chunks_before,
                n_chunks_after=n_chunks_after,
                shared_qk=share_qk,
                # A circle of chunks that causality hides need not be computed.
                wrap=not causal or n_chunks_before + n_chunks_after > 1,
                self_score=SELF_SCORE,
            )
        elif n_chunks_before or n_chunks_after:
            raise ValueError(
                f"chunk_len is None, but n_chunks_before is {n_chunks_before} and n_chunks_after "
                f"is {n_chunks_after}: set chunk_len"
            )
        else:
            op = shared_qk.shared_qk() if share_qk else dense.dense()
        super().__init__(
            op,
            n_heads=n_heads,
            d_qk=d_qk,
            d_v=d_v,
            causal=causal,
            masked=masked,
            bias=bias,
            mode=mode,
            attention_dropout=attention_dropout,
            output_dropout=output_dropout,
            n_parallel_heads=n_parallel_heads,
            use_python_loop=use_python_loop,
            use_reference_code=use_reference_code,
        )
        self._share_qk = share_qk
        self._chunk_len = chunk_len
        self._n_chunks_before = n_chunks_before
        self._n_chunks_after = n_chunks_after

    def _init_state(self, rng, batch, length):
        return ()

    def _plan(self, projections, segments, state, update):
        return (), state


class LSHSelfAttention(_TraxAttention):
    """`trax.layers.LSHSelfAttention`: hashes, weights of rounds and state are Trax's.

    `[B, T, D] -> [B, T, D]`; with `masked` a second input `[B, T]` that is True for tokens. A key
    counts once for each round that shows it. The state is `(buckets [B * n_heads, n_hashes * T],
    rng [B * n_heads, 2])`: from the buckets, which the forward pass leaves there, Trax's reversible
    layers attend to the same places in their backward pass.
    """

    def __init__(
        self,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        share_qk: bool | str = "unused",
        causal: bool = False,
        masked: bool = False,
        chunk_len: int = 128,
        n_chunks_before: int = 1,
        n_chunks_after: int = 0,
        n_hashes: int = 1,
        n_buckets: int | list[int] | tuple[int, ...] | None = None,
        mode: str = "train",
        predict_mem_len: int | None = 2048,
        predict_drop_len: int | None = 256,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        max_length_for_buckets: int | None = None,
        bias: bool = False,
        n_parallel_heads: int | None = 1,
        use_python_loop: bool = False,
        use_reference_code: bool = False,
    ):
        """Args:
        n_heads: number of heads.
        d_qk: size of a head's queries, which are its keys.
        d_v: size of a head's values.
        share_qk: "unused" or True: hashing needs one vector for query and key.
        causal: whether the future is hidden.
        masked: whether a mask comes as a second input.
        chunk_len: positions in a chunk of the sorted sequence.
        n_chunks_before: how many chunks before its own, in sorted order, a position sees.
        n_chunks_after: how many after it.
        n_hashes: hashing rounds.
        n_buckets: even; or a list of even factors; None is about two for each chunk.
        mode: "train" or "eval", which has no dropout.
        predict_mem_len: of use to Trax's mode "predict" alone.
        predict_drop_len: the same.
        attention_dropout: the rate on attention weights.
        output_dropout: the rate on the features of the output, the same ones at all positions.
        max_length_for_buckets: room in the state for sequences longer than the one that the layer
          was initialised with; None is that one's length.
        bias: whether queries and values have biases.
        n_parallel_heads: how many pairs of an example and a head to compute at a time: fewer need
          less memory; None is all of them. A multiple or a divisor of `n_heads`.
        use_python_loop: False; Trax's choice of implementation.
        use_reference_code: False; the same.

        Raises:
          NotImplementedError: an option of Trax that this layer does not have.
          ValueError: a value out of range.
        """
        del predict_mem_len, predict_drop_len
        if share_qk not in ("unused", True):
            raise NotImplementedError(
                f"share_qk={share_qk!r}: LSH attention hashes one vector for query and key; "
                "leave it out"
            )
        op = lsh.lsh(
            chunk_len=chunk_len,
            n_hashes=n_hashes,
            n_buckets="auto" if n_buckets is None else n_buckets,
            n_chunks_before=n_chunks_before,
            n_chunks_after=n_chunks_after,
            count_once=False,
            wrap=True,
            self_score=SELF_SCORE,
        )
        super().__init__(
            op,
            n_heads=n_heads,
            d_qk=d_qk,
            d_v=d_v,
            causal=causal,
            masked=masked,
            bias=bias,
            mode=mode,
            attention_dropout=attention_dropout,
            output_dropout=output_dropout,
            n_parallel_heads=n_parallel_heads,
            use_python_loop=use_python_loop,
            use_reference_code=use_reference_code,
        )
        self._chunk_len = chunk_len
        self._n_chunks_before = n_chunks_before
        self._n_chunks_after = n_chunks_after
        self._n_hashes = n_hashes
        self._n_buckets = n_buckets
        self._max_length_for_buckets = max_length_for_buckets

    def _init_state(self, rng, batch, length):
        n_pairs = batch * self._n_heads
        n_buckets = self._n_hashes * (self._max_length_for_buckets or length)
        return jnp.zeros((n_pairs, n_buckets), jnp.int32), jax.random.split(rng, n_pairs)

    def _plan(self, projections, segments, state, update):
        vectors = jax.lax.stop_gradient(projections.q)  # [E, T, G, H]
        length = vectors.shape[1]
        if self._n_buckets is None:
            factors = hashing.auto_buckets(length, self._chunk_len)
        else:
            factors = (self._n_buckets,) if isinstance(self._n_buckets, int) else self._n_buckets
        n_buckets = math.prod(factors) + self._masked  # padding has one of its own
        # In the state the rounds' buckets are numbered one after the other.
        first = n_buckets * jnp.arange(self._n_hashes)[:, None]
        stored, rngs = state
        if self._n_hashes * length > stored.shape[-1]:
            raise ValueError(
                f"the input has length {length}, but the state has room for "
                f"{stored.shape[-1] // self._n_hashes}: initialise the layer for this length, or "
                "set max_length_for_buckets"
            )
        if update:

            def hash_head(vectors, rng):  # [T, H] -> [n_hashes, T]
                return hashing.hash_vectors(vectors[None, :, None], factors, self._n_hashes, rng)[
                    0, 0
                ]

            rngs, subrngs = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(rngs), 2, 0)
            buckets = jax.vmap(jax.vmap(hash_head))(jnp.swapaxes(vectors, 1, 2), subrngs)
            if segments is not None:
                buckets = jnp.where(segments[:, None, None] > 0, buckets, n_buckets - 1)
            new = (buckets + first).reshape(*buckets.shape[:2], -1)
            stored = jnp.zeros_like(stored).at[..., : new.shape[-1]].set(new)
        else:
            buckets = stored[..., : self._n_hashes * length]
            buckets = buckets.reshape(*stored.shape[:2], self._n_hashes, length) - first
        plan = sorting.sort_by_bucket(
            buckets, n_buckets, segments, -length % min(self._chunk_len, length)
        )
        if length > self._chunk_len:
            chunks = self._chunk_len, self._n_chunks_before, self._n_chunks_after
            plan = in_a_circle(plan, *chunks)
        return plan, (stored, rngs)
