"""What an op refuses: one line that names the argument, its value and the way out."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import (
    block_patterns,
    block_sparse,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    moba,
    nsa,
    nystromformer,
    performer,
    retention,
    routing,
    sinks,
)
from reformax.ops.calls.dispatch import INTERPRETED
from tests.ops.inputs import call, draw
from tests.ops.rows import ROWS, over

KEY = jax.random.key(0)


def x(*shape):
    return jnp.zeros(shape or (2, 8, 2, 4))


SIZES = [
    (linear.linear, dict(chunk_len=0), "chunk_len is 0: expected at least 1"),
    (retention.retention, dict(gated=1), "gated is 1: expected True or False"),
    (retention.retention, dict(impl="cudnn"), "impl is 'cudnn': expected"),
    (linear.linear, dict(impl="cuda"), "impl is 'cuda': expected 'auto', 'xla' or 'pallas'"),
    (gated_linear.gated_linear, dict(impl="triton"), "impl is 'triton': expected"),
    (gated_delta.gated_delta, dict(impl="triton"), "impl is 'triton': expected"),
    (performer.performer, dict(impl="triton"), "impl is 'triton': expected"),
    (gated_linear.gated_linear, dict(temperature=0.0), "temperature is 0.0: expected a number"),
    (gated_linear.gated_linear, dict(temperature=1e-300), "temperature is 1e-300: expected a num"),
    (gated_linear.gated_linear, dict(memory=1e38), "memory is 1e+38: expected a number"),
    (gated_delta.gated_delta, dict(memory=1e-39), "memory is 1e-39: expected a number from 1e-6"),
    (gated_delta.gated_delta, dict(chunk_len=0), "chunk_len is 0: expected at least 1"),
    (gated_linear.gated_linear, dict(gate_rank=0), "gate_rank is 0: expected at least 1, or None"),
    (
        gated_delta.gated_delta,
        dict(norm_epsilon=1e-3, normalized=False),
        "norm_epsilon is 0.001 and normalized is False: leave one out",
    ),
    (kda.kda, dict(low_rank=4), "low_rank is 4: expected True or False"),
    (kda.kda, dict(memory=0.0), "memory is 0.0: expected a number from 1e-6"),
    (linear.linear, dict(conv_size=0), "conv_size is 0: expected at least 1"),
    (lsh.lsh, dict(chunk_len=0), "chunk_len is 0: expected at least 1"),
    (lsh.lsh, dict(n_hashes=0), "n_hashes is 0: expected at least 1"),
    (lsh.lsh, dict(n_hashes_eval=-2), "n_hashes_eval is -2: expected at least 1"),
    (lsh.lsh, dict(n_chunks_before=-1), "n_chunks_before is -1: expected at least 0"),
    (lsh.lsh, dict(n_chunks_after=-1), "n_chunks_after is -1: expected at least 0"),
    (lsh.lsh, dict(n_buckets=7), "n_buckets is 7: expected 'auto', or even"),
    (lsh.lsh, dict(n_buckets=0), "n_buckets is 0: expected 'auto', or even"),
    (lsh.lsh, dict(n_buckets=-4), "n_buckets is -4: expected 'auto', or even"),
    (lsh.lsh, dict(n_buckets=(4, 3)), "n_buckets is (4, 3): expected 'auto', or even"),
    (lsh.lsh, dict(n_buckets=()), "n_buckets is (): expected 'auto', or even"),
    (lsh.lsh, dict(n_buckets="many"), "n_buckets is 'many': expected 'auto', or even"),
    (
        lsh.lsh,
        dict(strictly_causal=True, n_chunks_after=1),
        "strictly_causal=True with n_chunks_before=1 and n_chunks_after=1: set n_",
    ),
    (
        lsh.lsh,
        dict(strictly_causal=True, n_chunks_before=0),
        "strictly_causal=True with n_chunks_before=0 and n_chunks_after=0: set n_",
    ),
    (local.local, dict(chunk_len=-8), "chunk_len is -8: expected at least 1"),
    (local.local, dict(n_chunks_before=-1), "n_chunks_before is -1: expected at least 0"),
    (local.local, dict(n_chunks_after=-1), "n_chunks_after is -1: expected at least 0"),
    (local.local, dict(window=0), "window is 0: expected at least 1"),
    (local.local, dict(chunk_len=4, window=6), "window is 6: expected at most 5"),
    (local.local, dict(chunk_len=4, window=10), "raise n_chunks_before to 3"),
    (local.local, dict(pad_chunks=0), "pad_chunks is 0: expected at least 1"),
    (local.local, dict(pad_chunks=2), "pad_chunks is 2 and wrap is False: set wrap=True"),
    (lsh.lsh, dict(pad_chunks=2), "pad_chunks is 2 and wrap is False: set wrap=True"),
    (dsa.dsa, dict(top_k=0), "top_k is 0: expected at least 1"),
    (dsa.dsa, dict(index_loss=-1.0), "index_loss is -1.0: expected a number of at least 0"),
    (hash_sparse.hash_sparse, dict(n_buckets=7), "n_buckets is 7: expected an even number"),
    (hash_sparse.hash_sparse, dict(n_buckets=0), "n_buckets is 0: expected at least 2"),
    (moba.moba, dict(block_size=0), "block_size is 0: expected at least 1"),
    (moba.moba, dict(top_k=0), "top_k is 0: expected at least 1"),
    (nsa.nsa, dict(n_selected=0), "n_selected is 0: expected at least 1"),
    (nsa.nsa, dict(compression="sum"), "compression is 'sum': expected 'mlp' or 'mean'"),
    (
        nsa.nsa,
        dict(compress_len=24),
        "compress_len is 24: expected a multiple of compress_stride, 16",
    ),
    (
        nsa.nsa,
        dict(block_size=40),
        "block_size is 40: expected a multiple of compress_stride, 16",
    ),
    (routing.routing, dict(n_clusters=0), "n_clusters is 0: expected at least 1"),
    (routing.routing, dict(cluster_size=0), "cluster_size is 0: expected at least 1"),
    (routing.routing, dict(decay=1.5), "decay is 1.5: expected at least 0 and at most 1"),
    (linformer.linformer, dict(n_projected=0), "n_projected is 0: expected at least 1"),
    (linformer.linformer, dict(max_length=0), "max_length is 0: expected at least 1"),
    (
        linformer.linformer,
        dict(parameter_sharing="keys"),
        "parameter_sharing is 'keys': expected 'none', 'headwise' or 'key-value'",
    ),
    (linformer.linformer, dict(impl="fast"), "impl is 'fast': expected 'auto', 'xla'"),
    (nystromformer.nystromformer, dict(n_landmarks=0), "n_landmarks is 0: expected at least 1"),
    (nystromformer.nystromformer, dict(n_iterations=0), "n_iterations is 0: expected at least 1"),
    (nystromformer.nystromformer, dict(conv_size=4), "conv_size is 4: expected an odd number"),
    (long_short.long_short, dict(window=0), "window is 0: expected at least 1"),
    (long_short.long_short, dict(rank=-1), "rank is -1: expected at least 0"),
    (long_short.long_short, dict(chunk_len=0), "chunk_len is 0: expected at least 1"),
    (performer.performer, dict(n_features=0), "n_features is 0: expected at least 1"),
    (performer.performer, dict(seed=-1), "seed is -1: expected a whole number from 0 to 2^63"),
    (performer.performer, dict(epsilon=0.0), "epsilon is 0.0: expected at least 1e-12"),
    (performer.performer, dict(chunk_len=0), "chunk_len is 0: expected at least 1"),
    (local.local, dict(wrap=True, window=4), "wrap is True and window is 4"),
    (lsh.lsh, dict(pad_chunks=0), "pad_chunks is 0: expected at least 1"),
    (lsh.lsh, dict(wrap=True), "wrap is True and count_once is True: set count_once=False"),
    (lsh.lsh, dict(rotations=x(2, 4, 1, 2)), "rotations are given and n_buckets is 'auto'"),
    (block_sparse.block_sparse, dict(block_size=0), "block_size is 0: expected a number of at"),
    (block_sparse.block_sparse, dict(block_size=(4, 4, 4)), "block_size is (4, 4, 4): expected"),
    (block_sparse.block_sparse, dict(block_size=8.5), "block_size is 8.5: expected a number"),
    (
        block_sparse.block_sparse,
        dict(pattern=np.ones((2, 2))),
        "pattern has shape (2, 2) and dtype float64: expected booleans, [n_blocks_q, n_blocks_k]",
    ),
    (block_sparse.block_sparse, dict(pattern=[True]), "pattern has shape (1,) and dtype bool"),
    (
        block_sparse.block_sparse,
        dict(impl="cudnn"),
        "impl is 'cudnn': expected 'auto', 'xla' or 'pallas'",
    ),
    (block_sparse.block_sparse, dict(n_global=-1), "n_global is -1: expected at least 0"),
    (block_patterns.bigbird, dict(n_random=-1), "n_random is -1: expected at least 0"),
    (sinks.sinks, dict(n_sinks=-1), "n_sinks is -1: expected at least 0"),
    (sinks.sinks, dict(impl="cudnn"), "impl is 'cudnn': expected 'auto', 'xla' or 'pallas'"),
    (longformer.longformer, dict(window=0), "window is 0: expected at least 1"),
    (
        longformer.longformer,
        dict(dilation=(1, 0)),
        "dilation is (1, 0): expected a number of at least 1, or one for each head",
    ),
    (block_patterns.butterfly, dict(n_factors=0), "n_factors is 0: expected at least 1"),
    (block_patterns.butterfly, dict(n_global=-1), "n_global is -1: expected at least 0"),
    (block_patterns.strided, dict(stride=0), "stride is 0: expected at least 1"),
    (block_patterns.fixed, dict(stride=0), "stride is 0: expected at least 1"),
    (block_patterns.fixed, dict(stride=2, n_summary=3), "n_summary is 3: expected at most the"),
    (block_patterns.local_global, dict(n_before=-1), "n_before is -1: expected at least 0"),
    (
        memory_efficient.memory_efficient,
        dict(query_chunk_size=0),
        "query_chunk_size is 0: expected at least 1, or 'sqrt'",
    ),
    (memory_efficient.memory_efficient, dict(key_chunk_size=-4), "key_chunk_size is -4: expected"),
    (memory_efficient.memory_efficient, dict(key_chunk_size="all"), "key_chunk_size is 'all': exp"),
    (
        memory_efficient.memory_efficient,
        dict(key_chunk_size=2.5),
        "key_chunk_size is 2.5: expected",
    ),
    (flash.flash, dict(query_block_size=0), "query_block_size is 0: expected at least 1"),
    (flash.flash, dict(key_block_size="sqrt"), "key_block_size is 'sqrt': expected a whole number"),
    (flash.flash, dict(scale=1e12), "scale is 1000000000000.0: expected a number from 1e-6 to"),
    (flash.flash, dict(scale=0.0), "scale is 0.0: expected a number from 1e-6 to 1e6, or N"),
    (
        flash.flash,
        dict(impl="triton"),
        "impl is 'triton': expected 'auto', 'xla', 'cudnn' or 'pallas'",
    ),
    (dense.dense, dict(impl="cuda"), "impl is 'cuda': expected 'auto', 'xla', 'cudnn' or 'pallas'"),
]


@pytest.mark.parametrize(
    "factory, options, message", SIZES, ids=[f"{f.__name__}-{o}" for f, o, _ in SIZES]
)
def test_options(factory, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        factory(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "factory, options",
    [
        (flash.flash, {"scale": (1e-6, 1e6)}),
        (gated_linear.gated_linear, {"temperature": (1e-6, 1e12), "memory": (1e-6, 1e12)}),
        (gated_delta.gated_delta, {"memory": (1e-6, 1e12)}),
        (kda.kda, {"memory": (1e-6, 1e12)}),
    ],
)
def test_numbers_at_their_bounds_are_those_of_float32(factory, options):
    for values in itertools.product(*options.values()):
        op = factory(**dict(zip(options, values, strict=True)))
        arrays = draw(op)

        def loss(x, op=op):
            return jnp.sum(jnp.sin(call(op, x, causal=True)))

        found = arrays.params, jax.value_and_grad(loss)(arrays)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found)), values


DENSE, FLASH, LSH, LOCAL = dense.dense(), flash.flash(), lsh.lsh(chunk_len=4), local.local()
MEMORY_EFFICIENT = memory_efficient.memory_efficient()
TWO_BLOCKS = block_sparse.block_sparse(pattern=np.ones((2, 2), bool), block_size=4)
THREE_HEADS = block_sparse.block_sparse(pattern=np.ones((3, 2, 2), bool), block_size=4)
INTEGERS = jnp.ones((2, 8), int)

CALLS = [
    (DENSE, (x(2, 8, 4), x(), x()), {}, "q has shape (2, 8, 4): expected [batch, length,"),
    (DENSE, (x(), x(), x(8, 2, 4)), {}, "v has shape (8, 2, 4): expected [batch, length,"),
    (DENSE, (x(), x(2, 8, 2, 3), x()), {}, "k has shape (2, 8, 2, 3): expected batch, heads"),
    (DENSE, (x(), x(1, 8, 2, 4), x(1, 8, 2, 4)), {}, "k has shape (1, 8, 2, 4): expected batch"),
    (DENSE, (x(), x(), x(2, 9, 2, 4)), {}, "v has shape (2, 9, 2, 4): expected"),
    (DENSE, (x(), x(), x(2, 8, 1, 4)), {}, "v has shape (2, 8, 1, 4): expected"),
    (FLASH, (x(), x(2, 8, 2, 3), x()), {}, "k has shape (2, 8, 2, 3): expected batch, heads"),
    (MEMORY_EFFICIENT, (x(), x(2, 8, 4, 4), x(2, 8, 4, 4)), {}, "k has shape (2, 8, 4, 4): exp"),
    (FLASH, (x(), x(), x()), dict(bias=x(3, 2, 8, 8)), "bias has shape (3, 2, 8, 8): expected"),
    (MEMORY_EFFICIENT, (x(), x(), x()), dict(bias=x(8, 8)), "bias has shape (8, 8): expected"),
    (LSH, (x(), None, x(2, 7, 2, 4)), {}, "v has shape (2, 7, 2, 4): expected"),
    (LOCAL, (x(), x(), x()), dict(rng=None, dropout=0.1), "rng is None: dropout > 0 needs one"),
    (LOCAL, (x(), x(), x()), dict(dropout=1.0), "dropout is 1.0: expected a rate in [0, 1)"),
    (LSH, (x(), None, x()), dict(dropout=-0.1), "dropout is -0.1: expected a rate in [0, 1)"),
    (
        DENSE,
        (x(), x(), x()),
        dict(segment_ids=INTEGERS[:1]),
        "segment_ids has shape (1, 8): expected",
    ),
    (
        DENSE,
        (x(), x(), x()),
        dict(segment_ids=np.full((2, 8), 2**32)),
        "segment_ids has ids up to 4294967296: expected integers of 32 bits",
    ),
    (LSH, (x(), None, x()), dict(segment_ids=INTEGERS[:, 1:]), "segment_ids has shape (2, 7)"),
    (
        DENSE,
        (x(), x(2, 9, 2, 4), x(2, 9, 2, 4)),
        dict(segment_ids=INTEGERS),
        "segment_ids has shape",
    ),
    (
        DENSE,
        (x(), x(2, 9, 2, 4), x(2, 9, 2, 4)),
        dict(segment_ids=(INTEGERS, INTEGERS)),
        "segment_ids has shape (2, 8): expected [batch, length] of k, (2, 9)",
    ),
    (DENSE, (x(), x(), x()), dict(bias=x(2, 8, 8)), "bias has shape (2, 8, 8): expected [batch"),
    (
        FLASH,
        (x(), x(), x()),
        dict(bias=x(1, 1, 8, 8) > 0),
        "bias has dtype bool: expected floats",
    ),
    (
        FLASH,
        (x(), x(), x()),
        dict(segment_ids=(None, INTEGERS)),
        "segment_ids is a tuple, but not a",
    ),
    (FLASH, (x(2, 0, 2, 4),) * 3, {}, "q has shape (2, 0, 2, 4): expected at least one of each"),
    (DENSE, (x(), x(), x()), dict(bias=x(2, 2, 8, 4)), "bias has shape (2, 2, 8, 4): expected"),
    (
        TWO_BLOCKS,
        (x(2, 9, 2, 4), x(), x()),
        {},
        "pattern has shape (2, 2): expected (3, 2), the blocks of 4 in 9 queries and of 4 in 8",
    ),
    (TWO_BLOCKS, (x(), x(2, 4, 2, 4), x(2, 4, 2, 4)), {}, "pattern has shape (2, 2): expected"),
    (THREE_HEADS, (x(), x(), x()), {}, "pattern has shape (3, 2, 2): expected (2, 2), the"),
    (LOCAL, (x(), x(), x()), dict(segment_ids=INTEGERS * 1.0), "segment_ids has dtype float32"),
]


@pytest.mark.parametrize(
    "op, inputs, options, message", CALLS, ids=[f"{c[0].name}-{c[3][:24]}" for c in CALLS]
)
def test_arguments(op, inputs, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        op(*inputs, **({"rng": KEY} | options))
    assert "\n" not in str(raised.value)


@over(row for row in ROWS if not row.in_kernel)
def test_an_op_refuses_what_it_cannot_do(row):
    """By its name and in one line."""
    op, longer = row.op(), x(2, 9, 2, 4)
    name = op.name
    inputs = x(), None if op.shared_qk else x(), x()
    *_, extra_projections, params = draw(op, length=8)
    given = dict(extra_projections=extra_projections, params=params)
    refused = [
        (
            (x(), x() if op.shared_qk else None, x()),
            dict(),
            f"but {name} makes its keys" if op.shared_qk else f"but {name} does not make its",
        )
    ]
    if not op.cross:
        pair = dict(segment_ids=(INTEGERS, INTEGERS))
        refused.append((inputs, pair, f"segment_ids is a pair, but {name} attends within one"))
    if not op.cross and not op.shared_qk:
        refused.append(((x(), longer, longer), {}, f"lengths 8 and 9, but {name} attends within"))
    if not op.bias:
        refused.append((inputs, dict(bias=x(1, 1, 8, 8)), f"bias is given, but {name} adds none"))
    if op.causality == "only":
        refused.append((inputs, dict(causal=False), f"causal=False: {op} is causal only, set"))
    if op.causality == "never":
        refused.append((inputs, dict(causal=True), f"causal=True: {name} cannot hide the future, "))
    if not op.dropout:
        refused.append((inputs, dict(dropout=0.1), f"dropout is 0.1: {name} makes no attention"))
    if not op.packed:
        packed = dict(segment_ids=INTEGERS.at[:, 4:].set(2))
        refused.append(
            (inputs, packed, f"segment_ids of a row are several, but {name} does not tell")
        )
    if op.plan_needs == "rng":
        refused.append((inputs, dict(rng=None), f"rng is None: {name}, which draws its plan at"))
    for arrays, options, message in refused:
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as raised:
            op(*arrays, **(dict(causal=row.causal(False), rng=KEY) | given | options))
        assert "\n" not in str(raised.value)


@over(row for row in ROWS if not row.in_kernel)
def test_an_op_refuses_integers_and_keywords_that_it_does_not_know(row):
    op = row.op()
    inputs = dict(q=x(), k=None if op.shared_qk else x(), v=x())
    *_, extra_projections, params = draw(op, length=8)
    call = dict(causal=row.causal(False), rng=KEY, extra_projections=extra_projections)
    for name, numbers in inputs.items():
        if numbers is not None:
            with pytest.raises(ValueError, match=f"^{name} has dtype int32: expected floats, as"):
                op(**inputs | {name: numbers.astype(jnp.int32)}, **call, params=params)
    # flax.nnx calls an attention function with these; `apply` takes no mask either.
    for unknown in ("mask", "dropout_rng", "deterministic", "precision"):
        if unknown != "mask":
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
                op(**inputs, **call, params=params, **{unknown: None})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            op.apply(
                params,
                **inputs,
                plan=None,
                segment_ids=None,
                dropout=0.0,
                **call,
                **{unknown: None},
            )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(q=[[0.0]]), "q is [[0.0]]: expected an array"),
        (dict(causal="no"), "causal is 'no': expected True or False"),
        (dict(causal=jnp.array(True)), "causal is Array(True, dtype=bool): expected True or"),
        (dict(train="no"), "train is 'no': expected True or False"),
        (dict(dropout="0.1", rng=KEY), "dropout is '0.1': expected a rate in [0, 1)"),
        (dict(dropout=0.1, rng=0), "rng is 0: expected a key, such as jax.random.key(0)"),
        (
            dict(dropout=0.1, rng=jax.random.split(jax.random.key(0))),
            "rng has shape (2,) and dtype key<fry>: expected one key, such as jax.random.key(0)",
        ),
        (dict(rng=np.ones(3)), "rng has shape (3,) and dtype float64: expected one key, such as"),
        (dict(segment_ids=[1, 1]), "segment_ids is [1, 1]: expected an array"),
        (dict(bias=[[0.0]]), "bias is [[0.0]]: expected an array"),
        (dict(params={"w": x()}), "params has ['w']: dense reads []"),
    ],
    ids=lambda case: "" if isinstance(case, str) else next(iter(case)),
)
def test_values_that_are_no_arrays_and_settings_that_are_none(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        dense.dense()(**dict(q=x(), k=x(), v=x()) | options)
    assert "\n" not in str(error.value)


def test_weights_of_another_name_or_size():
    op = gated_linear.gated_linear(gated=False)
    inputs = draw(op, length=8)
    call = dict(causal=True, extra_projections=inputs.extra_projections)
    without = {name: w for name, w in inputs.params.items() if name != "scale"}
    with pytest.raises(ValueError, match=r"params has \['bias'\]: gated_linear reads \['bias',"):
        op(*inputs[:3], params=without, **call)
    other = inputs.params | {"bias": jnp.zeros((3, 4))}
    message = r"params\['bias'\] has shape \(3, 4\): expected \(2, 4\), as of op.init"
    with pytest.raises(ValueError, match=message):
        op(*inputs[:3], params=other, **call)
    op = linformer.linformer(n_projected=4)
    longer = draw(op, length=12).params  # a shorter sequence reads their first rows
    assert op(*draw(op, length=8)[:3], params=longer).shape == (2, 8, 2, 4)


def test_what_an_op_cannot_do():
    with pytest.raises(ValueError, match="window is 5.*n_chunks_after is 0: raise it to 1"):
        local.local(chunk_len=4, window=5)(x(), x(), x(), causal=False)
    for causality, causal in (("never", True), ("only", False)):
        op = type("dense", (dense.dense,), {"causality": causality})()
        with pytest.raises(NotImplementedError, match=f"causal={causal}: dense"):
            op(x(), x(), x(), causal=causal)
    op = block_sparse.block_sparse(block_size=(16, 24), impl=INTERPRETED)
    with pytest.raises(NotImplementedError, match=r"block_size=\(16, 24\): use impl='auto'"):
        op(*[x(2, 32, 2, 4)] * 3)
    with pytest.raises(ValueError, match="pattern is traced: expected an array of NumPy"):
        jax.jit(lambda mask: block_sparse.block_sparse(pattern=mask))(np.ones((2, 2), bool))
    # float32 is beyond cuDNN's attention, wherever this runs.
    for op in (dense.dense(impl="cudnn"), flash.flash(impl="cudnn")):
        with pytest.raises(NotImplementedError, match="impl='cudnn' with .*use impl='auto' or"):
            op(x(), x(), x())
    kernel = flash.flash(impl=INTERPRETED)
    with pytest.raises(NotImplementedError, match="with bias=.1, 1, 8, 8.: use impl='auto'"):
        kernel(x(), x(), x(), bias=x(1, 1, 8, 8))
