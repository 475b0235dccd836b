"""One sequence on several of eight simulated devices, compared with one device.

`test_devices.py` runs this file in another process, which sees eight devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as Spec

from reformax import devices, generation
from reformax.buffers import Meter, advanced, measured
from reformax.declared import SettingError
from reformax.generation import reading, texts
from reformax.layers import Attention, AxialPositionalEncoding, CrossAttention
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import (
    asymmetric_lsh,
    block_sparse,
    csa,
    dense,
    dsa,
    flash,
    gated_delta,
    hca,
    kda,
    linformer,
    local,
    longformer,
    lsh,
    nsa,
    nystromformer,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.candidates import Clustered, Coded, Hashed, Pooled
from reformax.ops.indexing.indexer import Indexer
from reformax.ops.kernels.triton import chosen_keys
from reformax.ops.masking.masks import Tokens
from reformax.ops.sharding import borders
from reformax.ops.sharding.shard import Shard
from reformax.ops.softmax import block_kernels
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from tests.helpers import assert_trees_close
from tests.ops import inputs
from tests.ops.cudnn import instead_of_cudnn
from tests.ops.rows import ROWS, Shape
from tests.ops.test_against_oracle import check
from tools import program
from tools.hlo_collectives import collectives

pytestmark = pytest.mark.slow  # each part of them takes its share

CONTEXT = mesh_lib.make({"context": 8})
N = 8


@pytest.mark.parametrize("n, ahead", [(0, True), (2, False), (3, True), (8, False), (30, True)])
def test_a_border_is_the_ends_of_the_neighbours(n, ahead):
    length = 3
    x = np.arange(1, 2 * N * length * 2 + 1).reshape(2, N * length, 2)
    spec = Spec(None, "context")
    take = functools.partial(borders.border, axis="context", n=n, ahead=ahead)
    take = jax.shard_map(take, mesh=CONTEXT, in_specs=spec, out_specs=spec, check_vma=False)
    got = np.asarray(jax.jit(take)(x)).reshape(2, N, n, 2)
    padded = np.pad(x, ((0, 0), (n, n), (0, 0)))
    for i in range(N):
        start = n + (i + 1) * length if ahead else i * length
        np.testing.assert_array_equal(got[:, i], padded[:, start : start + n])


LOCAL = dict(chunk_len=4)
INDEXED = dict(top_k=6, n_index_heads=2, d_index=8)
SHARED_KV = dict(share_kv=True, rotary_features=4)
BY_GROUPS = Indexer(score="product", rotary=True, n_local=5, group=5)
CANDIDATES = {
    "pooled": Indexer(candidates=Pooled(block_sizes=(8, 4), n_blocks=2)),
    "clustered": Indexer(candidates=Clustered(stride=4, n_clusters=2, n_nearest=3)),
    "coded": Indexer(candidates=Coded(n_bits=16, n_best=8)),
    "hashed": Indexer(score="product", candidates=Hashed(n_hashes=3, n_buckets=4, n_nearest=4)),
}
# What an op's row does not have: an op, whether it is causal, and the length of its sequences.
OPS = {
    "chunks": (local.local(**LOCAL), True, 40),
    "chunks both ways that fit": (local.local(**LOCAL, n_chunks_after=1), False, 64),
    "long shards": (local.local(**LOCAL, n_chunks_after=1), False, 128),
    "long shards, shared": (local.local(**LOCAL, shared_qk=True), True, 128),
    "window in long shards": (local.local(**LOCAL, window=3, n_chunks_after=1), False, 136),
    "window": (local.local(**LOCAL, window=7, n_chunks_before=2), True, 40),
    "window both ways": (local.local(**LOCAL, window=4, n_chunks_after=1), False, 56),
    "window in a kernel": (local.local(**LOCAL, window=4, impl=INTERPRETED), True, 64),
    "further than a neighbour": (local.local(chunk_len=16, n_chunks_before=2), True, 40),
    "circle": (local.local(**LOCAL, wrap=True), True, 40),
    "local, fewer keys": (local.local(**LOCAL), True, 40),
    "lsh, 11 heads": (lsh.lsh(chunk_len=4, n_hashes=2), True, 40),
    "lsh, the next value": (lsh.lsh(chunk_len=4, attend_self_if_alone=False), True, 40),
    "biases": (dense.dense(), True, 40),
    "biases, 6 heads": (dense.dense(), True, 40),
    "fewer keys, 12 heads": (dense.dense(), True, 40),
    "ring": (flash.flash(), True, 48),
    "ring, odd shards": (flash.flash(query_block_size=2), True, 40),
    "ring both ways": (flash.flash(), False, 24),
    "ring of kernels": (flash.flash(impl=INTERPRETED), True, 40),
    "ring of shards of one": (flash.flash(), True, 8),
    "too few heads, biases": (flash.flash(), True, 16),
    "gated_delta, 6 heads": (
        gated_delta.gated_delta(gated=True, chunk_len=8, conv_size=3),
        True,
        40,
    ),
    "indexer, odd shards": (dsa.dsa(**INDEXED), True, 40),
    "indexer, chosen keys": (dsa.dsa(**INDEXED), True, 64),
    "indexer of kernels": (dsa.dsa(**INDEXED, impl=INTERPRETED), True, 40),
    "indexer of kernels, all tiles": (dsa.dsa(**INDEXED, impl=INTERPRETED), True, 24),
    "indexer of kernels, local keys": (
        dsa.dsa(**INDEXED, indexer=Indexer(n_local=3), impl=INTERPRETED),
        True,
        40,
    ),
    "indexer, logits by length": (dsa.dsa(**INDEXED, scale_by_length=0.4), True, 40),
    "indexer both ways": (dsa.dsa(**INDEXED), False, 40),
    "indexer, groups": (dsa.dsa(**INDEXED | dict(top_k=9), indexer=BY_GROUPS), True, 40),
    "indexer, blocks": (
        dsa.dsa(**INDEXED | dict(top_k=9), indexer=Indexer(rotary=True, block_size=4)),
        True,
        40,
    ),
    **{
        f"indexer, {name}": (dsa.dsa(**INDEXED, indexer=indexer), True, 40)
        for name, indexer in CANDIDATES.items()
    },
    "summaries": (csa.csa(**INDEXED | dict(top_k=3), window=6), True, 40),
    "summaries, logits by length": (
        csa.csa(**INDEXED | dict(top_k=3), window=6, scale_by_length=0.4),
        True,
        40,
    ),
    "summaries in whole shards": (csa.csa(**INDEXED, window=20), True, 64),
    "summaries, all seen": (hca.hca(block_size=16, window=16, **SHARED_KV), True, 72),
    "summaries, few key heads": (hca.hca(block_size=4, window=6), True, 40),
    "kda, 6 heads": (kda.kda(chunk_len=8, conv_size=3), True, 40),
    "linformer, weights": (linformer.linformer(n_projected=5, parameter_sharing="none"), False, 40),
    "nystromformer, convolved": (
        nystromformer.nystromformer(n_landmarks=5, conv_size=3),
        False,
        40,
    ),
}
OPTIONS = {
    "local, fewer keys": dict(n_kv_heads=2),
    "lsh, 11 heads": dict(n_heads=11),
    "lsh, the next value": dict(next_value=True),
    "biases": dict(position_bias="t5"),
    "biases, 6 heads": dict(n_heads=6, position_bias="t5"),
    "fewer keys, 12 heads": dict(n_heads=12, n_kv_heads=4),
    "gated_delta, 6 heads": dict(n_heads=6),
    "indexer, odd shards": dict(n_heads=3),
    "indexer of kernels": dict(n_heads=4, n_kv_heads=1),
    "indexer of kernels, all tiles": dict(n_heads=2),
    "indexer, chosen keys": dict(n_heads=4, n_kv_heads=1),
    "kda, 6 heads": dict(n_heads=6),
    "summaries": dict(n_heads=3),
    "summaries in whole shards": dict(n_heads=4, n_kv_heads=2),
    "summaries, all seen": dict(n_heads=4, n_kv_heads=1, d_v=4, use_rotary=False),
    "summaries, few key heads": dict(n_kv_heads=2),
    "ring": dict(n_heads=4, n_kv_heads=2),
    "ring, odd shards": dict(n_heads=1),
    "ring both ways": dict(n_heads=2, n_kv_heads=1),
    "ring of kernels": dict(n_heads=4, n_kv_heads=1, d_v=4),
    "ring of shards of one": dict(n_heads=3),
    "too few heads, biases": dict(n_heads=2, position_bias="t5"),
}
# Packed rows where the op tells them apart, and of each kind one without.
CASES = [(name, op.packed) for name, (op, *_) in OPS.items()]
CASES += [(name, False) for name in ("chunks", "long shards", "ring, odd shards")]
CASES += [("indexer, logits by length", False)]
# On eight devices for one row of a batch, and these on four for each of two as well.
ROWS_TOO = {"chunks", "long shards", "window", "lsh, 11 heads", "biases"}
ROWS_TOO |= {"indexer, chosen keys", "summaries"}


def check_layer(layer, length, meshes):
    """A layer, its gradients and dropout are those of one device."""
    random = np.random.default_rng(0)
    x, d_out = random.normal(size=(2, 2, length, 8)).astype(np.float32)
    ids = np.sort(random.integers(0, 4, (2, length)))[:, ::-1].astype(np.int32)
    inputs = (x, ids) if layer.masked else (x,)
    params = layer.init_params(jax.random.key(0), x.shape)

    def loss(params, x, *masks):
        out = layer.apply(params, x, *masks, rng=jax.random.key(1))
        return jnp.sum(out * d_out), out

    run = jax.grad(loss, argnums=(0, 1), has_aux=True)
    want = jax.jit(run)(params, *inputs)
    for mesh in meshes:
        placed = jax.device_put(inputs, devices.over_tokens(mesh))
        got = jax.jit(devices.on(mesh, run))(params, *placed)
        assert_trees_close(got, want)


def layer_of(op, causal, packed, **options):
    """A layer of 8 heads with dropout; `options` of `Attention` go first."""
    rates = dict(attention_dropout=0.2 * op.dropout, output_dropout=0.1)
    sizes = dict(n_heads=8, d_qk=4, d_v=3, masked=packed)
    return Attention(op, **dict(use_rotary=True) | sizes | rates | options, causal=causal)


@pytest.mark.parametrize("name, packed", CASES)
def test_a_layer_is_that_of_one_device(name, packed):
    op, causal, length = OPS[name]
    layer = layer_of(op, causal, packed, **OPTIONS.get(name, {}))
    more = [mesh_lib.make({"data": 2, "context": 4})] if name in ROWS_TOO else []
    check_layer(layer, length, [CONTEXT, *more])


def whole(plan):
    """A plan of shards on eight devices, `[8 B, t, K]`, as one device has it."""
    return np.moveaxis(np.reshape(plan, (N, -1, *plan.shape[1:])), 0, 1).reshape(
        plan.shape[0] // N, -1, plan.shape[2]
    )


CHOICES = "indexer, odd shards", "indexer both ways", "indexer, groups", "indexer of kernels"


@pytest.mark.parametrize("name", [*CHOICES, "indexer of kernels, local keys", "summaries"])
def test_a_choice_is_that_of_one_device(name):
    """To the bit, of scores of which many are 0 or equal otherwise."""
    op, causal, length = OPS[name]
    layer = Attention(op, n_heads=2, d_qk=4, d_v=4, causal=causal, masked=True)
    random = np.random.default_rng(0)
    x = random.integers(-1, 2, (2, length, 8)).astype(np.float32)
    ids = np.sort(random.integers(0, 3, (2, length)))[:, ::-1].astype(np.int32)
    params = layer.init_params(jax.random.key(0), x.shape)

    def plan(params, x, ids):
        return layer.plan(params, layer.project(params, x)[0], ids)

    placed = jax.device_put((x, ids), devices.over_tokens(CONTEXT))
    got = jax.jit(devices.on(CONTEXT, plan))(params, *placed)
    assert got.addressable_shards[0].data.shape[:2] == (2, length // N)
    np.testing.assert_array_equal(whole(got), jax.jit(plan)(params, x, ids))


def on_shards(op, causal, dropout):
    """`test_against_oracle.attend_and_differentiate` of shards of the queries on eight devices."""

    def of_shard(arrays, params, ids, rng, d_out):
        masks = dict(segment_ids=ids, causal=causal, rng=rng, shard=Shard(axis="context"))
        plan = inputs.plan(op, inputs.Inputs(*arrays, params), **masks, train=True)

        def attend(arrays, params):
            x = inputs.Inputs(*arrays, params)
            return inputs.apply(op, x, plan=plan, **masks, dropout=dropout)

        out, vjp = jax.vjp(attend, arrays, params)
        of_arrays, of_params = vjp(d_out)
        return plan, out, of_arrays, jax.lax.psum(of_params, "context")

    split, every = Spec(None, "context"), Spec()
    specs = dict(in_specs=(split, every, split, every, split), out_specs=(*[split] * 3, every))
    of_shards = jax.jit(jax.shard_map(of_shard, mesh=CONTEXT, **specs, check_vma=False))

    def run(x, bias, segment_ids, rng, d_out):
        plan, out, of_arrays, of_params = of_shards(x[:4], x.params, segment_ids, rng, d_out)
        return plan, out, (inputs.Inputs(*of_arrays, of_params), bias)

    return run


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "queries" in row.op().shards and not row.in_kernel],
    ids=lambda row: row.name,
)
def test_shards_of_queries_are_the_oracle_in_float64(row):
    """Outputs, all gradients and the indexer's loss, of packed and padded rows, with dropout."""
    case = dict(options=row.first, causal=row.causal(), packed=True, bias_axes=None)
    case |= dict(dropout=row.dropout(0.3), d_qk=4, d_v=3, seed=0)
    case |= dict(shape=Shape(batch=2, n_queries=24, n_keys=24, n_heads=2))
    run = on_shards(row.op(**row.first), case["causal"], case["dropout"])
    check(row, 1e-5, jnp.float32, **case, run=run)


@pytest.mark.parametrize("op", [dsa.dsa, csa.csa], ids=lambda op: op.__name__)
def test_the_indexers_loss_is_reported_as_that_of_one_device(op):
    """The mean over the queries of all devices, of which some have padding alone."""
    op = op(**INDEXED, report_loss=True)
    layer = Attention(op, n_heads=2, d_qk=4, d_v=4, causal=True, masked=True)
    x = jax.random.normal(jax.random.key(0), (1, 40, 8))
    ids = np.arange(40)[None] < 27
    params = layer.init_params(jax.random.key(1), x.shape)
    run = jax.grad(lambda params, x, ids: jnp.sum(layer.apply(params, x, ids)))
    placed = jax.device_put((x, ids), devices.over_tokens(CONTEXT))
    found = jax.jit(run)(params, x, ids), jax.jit(devices.on(CONTEXT, run))(params, *placed)
    one, other = (measured(advanced(params, change))["index_loss"] for change in found)
    assert one > 0.01
    np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.parametrize("kind", [TransformerLM, ReformerLM], ids=lambda kind: kind.__name__)
def test_layers_that_reuse_a_choice_are_those_of_one_device(kind):
    """In both stacks, of which one computes the attention again in the backward pass."""
    ops = dsa.dsa(**INDEXED), dsa.dsa(reuse=True), csa.csa(**INDEXED), csa.csa(reuse=True)
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_heads=2, n_layers=4, dropout=0.1)
    model = kind(**sizes, attention_type=ops)
    tokens = np.random.default_rng(0).integers(1, 16, (2, 40)).astype(np.int32)
    params = model.init_params(jax.random.key(0), tokens.shape)

    def loss(params, tokens):
        features = model.features(params, tokens, rng=jax.random.key(1))
        return jnp.sum(jnp.sin(jax.tree.leaves(features)[0]))

    run = jax.value_and_grad(loss)
    placed = jax.device_put(tokens, devices.over_tokens(CONTEXT))
    got = jax.jit(devices.on(CONTEXT, run))(params, placed)
    assert_trees_close(got, jax.jit(run)(params, tokens), 1e-4)


def test_of_a_choice_only_keys_and_values_are_gathered():
    """Neither queries, outputs and choices nor heads that keys are repeated for."""
    length, n_heads, size = 512, 8, 8
    op = dsa.dsa(top_k=64, n_index_heads=4, d_index=8)
    sizes = dict(n_heads=n_heads, n_kv_heads=1, d_qk=size, d_v=size, causal=True)
    layer, x = Attention(op, **sizes), jnp.ones((1, length, 64))
    params = layer.init_params(jax.random.key(0), x.shape)
    placed = jax.device_put(x, devices.over_tokens(CONTEXT))
    run = jax.grad(lambda params, x: jnp.sum(jnp.sin(layer.apply(params, x))), argnums=(0, 1))
    step = jax.jit(devices.on(CONTEXT, run)).lower(params, placed).compile()
    found = [x for x in collectives(step.as_text()) if len(x.groups[0]) > 1]
    gathered = [each.size for each in found if each.kind in ("all-gather", "reduce-scatter")]
    assert gathered and max(gathered) <= 4 * length * size * 3
    of_weights = 4 * sum(x.size for x in jax.tree.leaves(params))
    assert sum(x.size for x in found if x.kind == "all-reduce") <= 2 * of_weights
    assert {each.kind for each in found} <= {"all-gather", "reduce-scatter", "all-reduce"}


def test_kernels_by_lists_attend_for_a_shard(monkeypatch):
    """At sizes at which lists do not pay yet."""
    monkeypatch.setattr(chosen_keys, "reads_lists", lambda *sizes: True)
    op, causal, length = OPS["indexer of kernels"]
    check_layer(layer_of(op, causal, True, **OPTIONS["indexer of kernels"]), length, [CONTEXT])


def test_kept_mass_of_chosen_keys_is_that_of_one_device():
    layer = Attention(dsa.dsa(**INDEXED), n_heads=2, d_qk=4, d_v=4, causal=True, masked=True)
    x = jax.random.normal(jax.random.key(0), (2, 40, 8))
    ids = np.arange(40)[None] < np.array([[27], [40]])
    params = layer.init_params(jax.random.key(1), x.shape)
    params["kept_mass"] = Meter(jnp.zeros(()))
    run = jax.grad(lambda params, x, ids: jnp.sum(layer.apply(params, x, ids)))
    placed = jax.device_put((x, ids), devices.over_tokens(CONTEXT))
    one = jax.jit(run)(params, x, ids)["kept_mass"].value
    other = jax.jit(devices.on(CONTEXT, run))(params, *placed)["kept_mass"].value
    assert 0 < one < 1
    np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes, n_heads, n_calls",
    [({"data": 8}, 2, 1), ({"data": 2, "context": 4}, 4, 1), ({"data": 2, "context": 4}, 1, 0)],
    ids=["rows", "heads for positions", "ring"],
)
def test_padding_behind_rows_is_that_of_one_device(sizes, n_heads, n_calls, monkeypatch):
    """Whole rows have their lengths on each device. In a ring shards have segments."""
    layer = Attention(flash.flash(), n_heads, d_qk=8, d_v=8, masked=True)
    real = np.arange(16) < np.array([16, 15, 9, 8, 7, 4, 1, 0])[:, None]
    x, d_out = np.random.default_rng(0).normal(size=(2, 8, 16, 8)).astype(np.float32)
    params = layer.init_params(jax.random.key(0), x.shape)

    def loss(params, x, real):
        out = layer.apply(params, x, Tokens(real, right_padded=True))
        return jnp.sum(out * d_out), out

    run = jax.grad(loss, argnums=(0, 1), has_aux=True)
    want = jax.jit(run)(params, x, real)
    calls = instead_of_cudnn(monkeypatch, block_kernels)
    mesh = mesh_lib.make(sizes)
    placed = jax.device_put((x, real), devices.over_tokens(mesh))
    assert_trees_close(jax.jit(devices.on(mesh, run))(params, *placed), want)
    assert len(calls) == n_calls


FACTORIES = {row.factory: row for row in reversed(ROWS) if not row.in_kernel}
KERNELS = [row for row in ROWS if row.name in ("flash_pallas", "lsh_pallas")]


@pytest.mark.parametrize("row", [*FACTORIES.values(), *KERNELS], ids=lambda row: row.name)
def test_every_op_is_that_of_one_device(row):
    op = row.op()
    layer = layer_of(op, row.causal(), op.packed, d_v=4)
    if op.shards or op.reach(True) is not None:
        check_layer(layer, 40, [CONTEXT])
    else:
        with pytest.raises(SettingError, match="computes all heads together: use context=1"):
            check_layer(layer, 40, [CONTEXT])


@pytest.mark.parametrize(
    "op",
    [dense.dense(), asymmetric_lsh.asymmetric_lsh(chunk_len=8), smyrf.smyrf(chunk_len=8)],
    ids=lambda op: op.name,
)
def test_cross_attention_is_that_of_one_device(op):
    layer = CrossAttention(op, n_heads=8, d_qk=4, d_v=3, masked=True)
    x, memory = (jax.random.normal(jax.random.key(n), (2, n, 8)) for n in (24, 40))
    ids, memory_ids = (jnp.ones(y.shape[:2], jnp.int32).at[1, 9:].set(2) for y in (x, memory))
    params = layer.init_params(jax.random.key(0), x.shape)

    def loss(params, *inputs):
        return jnp.sum(jnp.sin(layer.apply(params, *inputs, rng=jax.random.key(1))))

    run = jax.value_and_grad(loss, argnums=(0, 1, 2))
    inputs = x, memory, ids, memory_ids
    placed = jax.device_put(inputs, devices.over_tokens(CONTEXT))
    got = jax.jit(devices.on(CONTEXT, run))(params, *placed)
    assert_trees_close(got, jax.jit(run)(params, *inputs))


@pytest.mark.parametrize(
    "op, n_heads, message",
    [
        (
            block_sparse.block_sparse(pattern=np.ones((8, 1, 1), bool)),
            8,
            "context=8 and op is block_sparse.*, which computes all heads together: use context=1",
        ),
        (
            block_sparse.block_sparse(pattern=lambda *n_blocks: np.ones((8, *n_blocks), bool)),
            8,
            "pattern gives masks of 8 heads, .8, 1, 1., and devices share the heads: use context=1",
        ),
        (
            longformer.longformer(window=4, n_global=1),
            8,
            "context=8 and op is longformer.*, which computes all heads together: use context=1",
        ),
        (
            dsa.dsa(**INDEXED, indexer=Indexer(n_local=3, group=3)),
            8,
            "group is 3 and a device has 2 positions of each sequence, which it does not divide",
        ),
        (
            nsa.nsa(compression="mean", independent_kv=False),
            8,
            "choose together for each of 2 heads of keys: expected a multiple of 8",
        ),
    ],
)
def test_what_devices_cannot_share_is_told_in_one_line(op, n_heads, message):
    n_kv_heads = 2 if "key heads" in op.shards else None
    layer = Attention(op, n_heads=n_heads, d_qk=4, d_v=4, causal=True, n_kv_heads=n_kv_heads)
    x = jax.device_put(jnp.ones((1, 16, 8)), devices.over_tokens(CONTEXT))
    params = layer.init_params(jax.random.key(0), x.shape)
    with pytest.raises(SettingError, match=message) as error:
        jax.jit(devices.on(CONTEXT, layer.apply))(params, x, rng=jax.random.key(0))
    assert "\n" not in str(error.value)


MODELS = {
    "reformer": lambda: ReformerLM(
        attention_type=(local.local(chunk_len=16), lsh.lsh(chunk_len=16, n_hashes=2)),
        ff_chunk_size=24,
        **SIZES,
    ),
    "transformer": lambda: TransformerLM(attention_type=dense.dense(), **SIZES),
}
SIZES = dict(
    vocab_size=64, d_model=32, d_ff=64, n_heads=8, d_attention_key=4, d_attention_value=4,
    n_layers=4, dropout=0.1,
)  # fmt: skip


def test_of_axial_positions_the_gradients_of_tables_are_exchanged_alone():
    layer, mesh = AxialPositionalEncoding((16, 32), (24, 40)), mesh_lib.make({"data": 8})
    x = jax.ShapeDtypeStruct((8, 500, 64), jnp.bfloat16, sharding=devices.over_tokens(mesh))
    params = jax.eval_shape(lambda: layer.init_params(jax.random.key(0), x.shape))

    def loss(params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x).astype(jnp.float32)))

    step = jax.jit(devices.on(mesh, jax.grad(loss))).lower(params, x).compile()
    sent = sum(each.times * each.sent for each in collectives(step.as_text()))
    assert sent <= 2 * 4 * (16 * 24 + 32 * 40)


@pytest.mark.parametrize(
    "name, sizes",
    [(name, {"data": 2, "context": 4}) for name in MODELS] + [("reformer", {"data": 2, "fsdp": 4})],
)
def test_no_activation_is_gathered(name, sizes, monkeypatch, capfd):
    """Devices trade heads for positions, and exchange weights and gradients; nothing else."""
    monkeypatch.setattr(devices, "LEAST_SPLIT", 64)
    rows, length, by_heads = 8, 1024, "context" in sizes
    mesh, model, sgd = mesh_lib.make(sizes), MODELS[name](), optax.sgd(0.1)
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (rows, length)))
    state = jax.eval_shape(lambda p: step_lib.first_state(p, sgd, ema=False), params)
    placement = devices.placement(state, mesh)
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, placement
    )
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=devices.over_tokens(mesh))
    weights = jax.ShapeDtypeStruct((rows, length), jnp.float32, sharding=devices.over_tokens(mesh))
    step = step_lib.step_fn(model, sgd, mesh, loss_chunk_len=100, placement=placement)
    lowered = step.lower(state, (tokens, tokens, weights), jax.random.PRNGKey(0))
    found = collectives(lowered.compile().as_text())
    activation = 4 * rows * length // 8 * 32  # bytes, of one device
    weights = [4 * x.size for x in jax.tree.leaves(params)]
    for each in found:
        if len(each.groups[0]) == 1:  # nothing is sent
            continue
        if each.kind == "all-gather":  # ids; a layer's weights
            assert each.size <= (4 * rows // 2 * length if by_heads else max(weights)), each
        if each.kind == "all-reduce":
            assert each.size <= sum(weights), each
        if each.kind == "collective-permute":
            assert each.size < activation // 4, each
    trades = sum(each.times * each.size for each in found if each.kind == "all-to-all")
    # q, v (and k) there, the output back, in three passes: forward, again, and the gradient.
    assert 0 < trades <= 4 * activation * 4 * 3 if by_heads else trades == 0
    assert "rematerialization" not in capfd.readouterr().err  # XLA's warning of what it gathers


def test_the_kernels_of_a_divided_step_are_counted(capsys):
    program.main(["--tiny", "--devices=2", "--mesh=context"])
    printed = capsys.readouterr().out
    assert "a step of 1 x 128 tokens on 2 devices: " in printed
    # Of one layer q, v and the output, in three passes.
    assert "| all-to-all | 9 |" in printed


@pytest.mark.parametrize("piece", [None, 16])
def test_caches_of_generation_are_divided(piece):
    """Texts and the state are those of one device; a device has an eighth of dense caches."""
    ops = local.local(chunk_len=4), shared_qk.shared_qk(attend_self_if_alone=False)
    ops += kda.kda(chunk_len=4), flash.flash(learned_sinks=True)
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=4, n_heads=2, mode="eval")
    heads = dict(d_attention_key=4, d_attention_value=4, next_value=True)
    model = TransformerLM(**sizes, **heads, attention_type=ops)
    params = jax.device_get(model.init_params(jax.random.key(0), (1, 8)))
    params["logits"]["w"] = params["logits"]["w"] * 8
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 16, n).tolist() for n in (37, 1, 24)]
    shared = dict(mesh=CONTEXT, divide_caches=True, prompt_piece=piece)
    options = dict(temperature=0, max_length=77)  # which 8 devices do not divide
    want = generation.generate(model, params, prompts, 7, **options)
    got = generation.generate(model, params, prompts, 7, **options, **shared)
    np.testing.assert_array_equal(got, want)
    state = generation.read(model, params, prompts, max_length=77, **shared)
    (_, far, _, flat), *_ = state.model.caches
    for cache in (far.op, flat.op):
        for x in cache:
            assert x.shape[2] == 80 and x.addressable_shards[0].data.shape[2] == 10
    got = generation.generate(model, params, [[]] * 3, 7, temperature=0, state=state, **shared)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(SettingError, match="^state has caches of context=8, and"):
        generation.generate(model, params, [[]] * 3, 7, state=state)  # in another order
    state = generation.read(model, params, prompts, max_length=80)
    with pytest.raises(SettingError, match="^state has caches of context=1, and"):
        generation.read(model, params, prompts, state=state, **shared)


CHOOSING = {
    "indexer": dsa.dsa(**INDEXED),
    "local keys": dsa.dsa(**INDEXED, indexer=Indexer(score="product", rotary=True, n_local=3)),
    "all keys": dsa.dsa(n_index_heads=2, d_index=8, scale_by_length=0.3),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_choices_among_divided_caches_are_those_of_one_device(name):
    """Of each device's keys the best, and of these; a later layer reuses them."""
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=3, n_heads=4, mode="eval")
    ops = CHOOSING[name], dsa.dsa(reuse=True)
    model = TransformerLM(**sizes, n_kv_heads=2, attention_type=(*ops, local.local(chunk_len=4)))
    params = jax.device_get(model.init_params(jax.random.key(0), (1, 8)))
    params["logits"]["w"] = params["logits"]["w"] * 8
    prompts = [[*range(16), *range(15, 0, -2)], [3, 1], [5]]
    options, shared = dict(temperature=0, max_length=77), dict(mesh=CONTEXT, divide_caches=True)
    generate = functools.partial(generation.generate, model, params, prompts, 9)
    want = generate(**options)
    for piece in (None, 8):
        got = generation.generate(
            model, params, prompts, 9, **options, **shared, prompt_piece=piece
        )
        np.testing.assert_array_equal(got, want)
    state = generation.read(model, params, prompts, max_length=77, **shared)
    (cache, reusing, _), *_ = state.model.caches
    memory = *cache.op.memory, *reusing.op.memory
    lengths = [(x, 2) for x in memory] + [(cache.op.index.keys, 1)]
    for x, axis in lengths:
        assert x.shape[axis] == 80 and x.addressable_shards[0].data.shape[axis] == 10


def test_biases_reach_divided_caches():
    """Of positions that a device has, in pieces and in steps."""
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=1, n_heads=2, mode="eval")
    model = TransformerLM(**sizes, attention_type=dense.dense(), pos_type="alibi")
    params = jax.device_get(model.init_params(jax.random.key(0), (1, 8)))
    params["logits"]["w"] = params["logits"]["w"] * 8
    prompts, options = [[*range(16)], [3, 1]], dict(temperature=0, max_length=40)
    want = generation.generate(model, params, prompts, 7, **options)
    shared = dict(mesh=CONTEXT, divide_caches=True)
    got = generation.generate(model, params, prompts, 7, **options, **shared)
    np.testing.assert_array_equal(got, want)


def test_windows_and_first_tokens_are_whole_on_each_device():
    """Their cache has one size, so texts go on without end."""
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=1, n_heads=2, mode="eval")
    op = sinks.sinks(window=6, n_sinks=2)
    model = TransformerLM(**sizes, attention_type=op, pos_type="rotary")
    params = jax.device_get(model.init_params(jax.random.key(0), (1, 8)))
    params["logits"]["w"] = params["logits"]["w"] * 8
    prompts, options = [[*range(16)], [3, 1]], dict(temperature=0)
    want = generation.generate(model, params, prompts, 7, **options)
    shared = dict(mesh=CONTEXT, divide_caches=True)
    for mesh in (shared, {}):
        state = generation.read(model, params, prompts, **mesh)
        assert not state.room
        got = generation.generate(model, params, [[]] * 2, 7, state=state, **options, **shared)
        np.testing.assert_array_equal(got, want)


def test_a_device_holds_its_part_of_the_caches():
    """Of the program that reads a piece: its arguments and results are an eighth as large."""
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=1, n_heads=2, mode="eval")
    model = TransformerLM(**sizes, attention_type=flash.flash())
    params = model.init_params(jax.random.key(0), (1, 8))
    piece = jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def memory(mesh):
        zeros = devices.placed(mesh, np.zeros(1, np.int32), ())[0]
        given = model, 4096, mesh, params, jax.random.PRNGKey(0), zeros
        first = texts.compiled_first_state.lower(*given).compile()
        state = texts.compiled_first_state.eval_shape(*given)
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            *(state, first.output_shardings),
        )
        read = reading.read_piece.lower(model, mesh, params, *piece, state).compile()
        return read.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(params))

    (one, weights), (eighth, _) = memory(None), memory(CONTEXT)
    assert one.alias_size_in_bytes == 4 + 2 * 2 * 64 * 4096 * 4
    assert eighth.alias_size_in_bytes == 4 + 2 * 2 * 64 * 4096 * 4 // 8
    assert eighth.argument_size_in_bytes < one.argument_size_in_bytes / 8 + weights + 2**10
    assert eighth.temp_size_in_bytes < one.temp_size_in_bytes


@pytest.mark.parametrize(
    "op", [lsh.lsh(chunk_len=4), dsa.dsa(indexer=CANDIDATES["pooled"])], ids=lambda op: op.name
)
def test_caches_that_are_not_divided_are_refused(op):
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=1, n_heads=2, mode="eval")
    model = TransformerLM(**sizes, attention_type=op)
    params = model.init_params(jax.random.key(0), (1, 8))
    shared = dict(mesh=CONTEXT, divide_caches=True)
    refusal = f"^mesh has context=8 and op is {op.name}.*whose cache is not"
    with pytest.raises(SettingError, match=refusal):
        generation.stream(model, params, [[1]], 2, **shared)  # before a token is asked for


def test_a_whole_prompt_is_not_read_into_a_divided_cache():
    """Reading in pieces does that: a device would take the cache of all for its part."""
    model = TransformerLM(
        **dict(vocab_size=16, d_model=8, d_ff=16, n_layers=1, n_heads=8, mode="eval"),
        attention_type=flash.flash(),
    )
    params = model.init_params(jax.random.key(0), (1, 8))
    prefill = devices.on(CONTEXT, functools.partial(model.prefill, capacity=16))
    with pytest.raises(SettingError, match="context=8 and op is flash.*whose cache devices divide"):
        jax.jit(prefill)(params, jnp.ones((1, 8), jnp.int32), jnp.full(1, 8))
