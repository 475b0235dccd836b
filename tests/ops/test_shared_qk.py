"""Dense attention with shared queries and keys by cuDNN, whose place another op takes here."""

import jax
import numpy as np
import pytest

from reformax.ops import dense, shared_qk
from tests.helpers import assert_trees_close, with_gradients


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


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(causal=False), "causal=False"),
        (dict(causal=True), "dtypes float32"),
        (dict(causal=True, segment_ids=np.ones((2, 8), np.int32)), "segment_ids"),
    ],
)
def test_what_cudnn_cannot_compute(options, message, monkeypatch):
    monkeypatch.setattr("reformax.ops.calls.dispatch.gpu_obstacle", lambda: None)
    x = jax.ShapeDtypeStruct((2, 8, 3, 8), np.float32)
    op = shared_qk.shared_qk(impl="cudnn")
    with pytest.raises(NotImplementedError, match=f"^impl='cudnn' with {message}"):
        jax.eval_shape(lambda x: op(x, None, x, **options), x)


@pytest.mark.parametrize(
    "impl, causal",
    [
        ("xla", True),
        ("xla", False),
        ("pallas_interpret", True),
        ("pallas_interpret", False),
        ("cudnn", True),
    ],
)
def test_a_lone_position_that_is_not_finite(impl, causal, monkeypatch):
    """It sees itself, so that its row is NaN and has no gradient."""
    monkeypatch.setattr(shared_qk, "cudnn_attention", dense.dense())
    monkeypatch.setattr(shared_qk, "cudnn_obstacle", lambda *_: None)
    monkeypatch.setattr("reformax.ops.calls.dispatch.gpu_obstacle", lambda: None)
    segment_ids = None if impl == "cudnn" else np.array([[3, 1, 1, 0, 2, 2]])
    q, v, d_out = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4)).astype(np.float32)
    op = shared_qk.shared_qk(impl=impl)

    def lone(q, v):
        return op(q, None, v, causal=causal, segment_ids=segment_ids)[:, :1]

    run = with_gradients(lone)
    for value in (np.nan, np.inf):
        for place in range(2):
            x = q.copy(), v.copy()
            x[place][0, 0, 1, 2] = value
            out, (dq, dv) = run(d_out[:, :1], *x)
            np.testing.assert_array_equal(out[0, 0, 0], v[0, 0, 0])
            assert np.all(np.isnan(out[0, 0, 1]))
            np.testing.assert_array_equal(dv[0, 0], d_out[0, 0] * [[1], [0]])
            assert not np.any(dq[0, 0, 0])
