"""Dense attention with shared queries and keys by cuDNN, whose place another op takes here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, shared_qk
from tests.helpers import assert_trees_close, with_gradients
from tests.ops.cudnn import instead_of_cudnn


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("length", [1, 9])
def test_causal_attention_moved_by_one_position(own, length, monkeypatch):
    """To those before: what NVIDIA's kernel is asked for is causal attention, and the first row."""
    monkeypatch.setattr(shared_qk, "cudnn_attention", dense.dense())
    q, v, d_out = np.random.default_rng(0).normal(size=(3, 2, length, 3, 4)).astype(np.float32)
    op = shared_qk.shared_qk(attend_self_if_alone=own, impl="xla")
    want = with_gradients(lambda q, v: op(q, None, v, causal=True))(d_out, q, v)
    got = with_gradients(lambda q, v: shared_qk._to_those_before(q, v, own))(d_out, q, v)
    assert_trees_close(got, want)


@pytest.mark.parametrize("own", [True, False])
def test_padding_behind_rows_reaches_cudnn(own, monkeypatch):
    """Rows without padding, with some, with one token and with none."""
    lengths = jnp.array([9, 5, 1, 0])
    instead_of_cudnn(monkeypatch, shared_qk)
    q, v, d_out = np.random.default_rng(0).normal(size=(3, 4, 9, 2, 8)).astype(np.float32)
    masks = dict(segment_ids=jnp.arange(9)[None] < lengths[:, None], causal=True)
    op = shared_qk.shared_qk(attend_self_if_alone=own)
    attend = functools.partial(op.apply, (), plan=(), **masks)
    got, want = (
        with_gradients(lambda q, v, given=given: attend(q, None, v, **given))(d_out, q, v)
        for given in (dict(lengths=lengths), {})
    )
    assert_trees_close(got, want)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(causal=False), "causal=False"),
        (dict(causal=True), "dtypes float32"),
        (dict(causal=True, segment_ids=np.ones((2, 8), np.int32)), "segment_ids"),
    ],
)
def test_what_cudnn_cannot_compute(options, message, monkeypatch):
    monkeypatch.setattr("reformax.ops.calls.this_gpu.obstacle", lambda: None)
    x = jax.ShapeDtypeStruct((2, 8, 3, 8), np.float32)
    op = shared_qk.shared_qk(impl="cudnn")
    with pytest.raises(NotImplementedError, match=f"^impl='cudnn' with {message}"):
        jax.eval_shape(lambda x: op(x, None, x, **options), x)
