"""Our attentions by length: the rows of `benchmarks.attention`, a process each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks.harness import rows
from benchmarks.harness.by_length import left_out, save, timed
from benchmarks.harness.calls import attempt, attempt_each, compiled, reason
from benchmarks.harness.processes import Answer, alone, stage, together
from benchmarks.peers import jax_linear_attention
from reformax import memory
from reformax.ops import (
    AttentionOp,
    asymmetric_lsh,
    block_patterns,
    block_sparse,
    csa,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    hca,
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
    sinks,
    smyrf,
)
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing import candidates
from reformax.ops.indexing.indexer import Indexer
from reformax.ops.recurrence.random_features import orthogonal_directions
from reformax.ops.softmax.orders import Order

# Of the largest number of each array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-5}
# A vector between two buckets may fall in either, and moves what lies between them by one place.
NEAR, NEAR_SHARE = 16, 0.9
# Scores of blocks may be as near.
SAME_SHARE = 0.99
MOST = 1.0  # seconds of the calls of a pass
N_FEATURES = 256
PATTERNS = {
    "butterfly": block_patterns.butterfly(),
    "strided": block_patterns.strided(stride=16),
    "fixed": block_patterns.fixed(stride=16),
    "local + global": block_patterns.local_global(n_before=3, n_after=0),
}


class Shape(NamedTuple):
    """The sizes of a run.

    Attributes:
      lengths: of the rows.
      n_heads, d_head, dtype: of their arrays.
      check_length: at which rows are checked.
      block: of MoBA; windows are half of it, chunks and the blocks of patterns a fourth.
      n_global: global tokens of Longformer.
      tokens: of a call, as far as several sequences of a length are in them.
    """

    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str
    check_length: int
    block: int
    n_global: int
    tokens: int = 1

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


class Made(NamedTuple):
    """An op of a table.

    Attributes:
      make: makes it of `impl`.
      reference: what it is checked against; None: its other implementation.
      causal: whether later keys are hidden.
      packed: whether rows are of seven documents and padding.
      n_global: the first tokens, which are global ones.
      n_kv_heads: heads of keys; None: as many as of queries.
      dense: the row that it is compared with.
      heads: heads of queries and their size; None: the run's.
      check_length: at which it is checked; None: the run's.
    """

    make: Callable[..., AttentionOp]
    reference: Callable[..., AttentionOp] | None = None
    causal: bool = True
    packed: bool = False
    n_global: int = 0
    n_kv_heads: int | None = None
    dense: str = "flash"
    heads: tuple[int, int] | None = None
    check_length: int | None = None


def algorithms(shape: Shape, epsilon: float = 1e-4) -> dict[str, dict[str, Made]]:
    """The ops by group and name, the most important first. epsilon: Performer's."""
    of, half = functools.partial, shape.block // 2
    chunk_len, stride = half // 2, max(2, half // 16)
    one, four = dict(n_kv_heads=1), dict(n_kv_heads=4, heads=(64, 128))  # NSA's paper has four
    exact = {"flash": Made(flash.flash, of(dense.dense, impl="xla"))}
    if jax.default_backend() == "gpu":  # elsewhere "auto" is "xla"
        for impl in ("xla", "pallas"):
            name = f"flash, impl={impl!r}"
            exact[name] = exact["flash"]._replace(make=lambda impl, own=impl: flash.flash(impl=own))
    exact |= {
        "memory_efficient": Made(
            lambda impl: memory_efficient.memory_efficient(), of(dense.dense, impl="xla")
        ),
    }
    # Each is what attentions of the same heads are compared with.
    for name, heads in {
        "flash, 1 head of keys": one,
        "flash, 64 heads of 128": four,
        "flash, 32 heads of 128 on 1": dict(n_kv_heads=1, heads=(32, 128)),
        "flash, 2 heads of keys": dict(n_kv_heads=2),
    }.items():
        exact[name] = Made(flash.flash, dense=name, **heads)

    chunks = dict(chunk_len=chunk_len, n_chunks_before=1, n_chunks_after=0)
    hashed = {
        "lsh": Made(of(lsh.lsh, **chunks, n_hashes=4)),
        "lsh, packed": Made(of(lsh.lsh, **chunks, n_hashes=4), packed=True),
        "lsh, 1 hash": Made(of(lsh.lsh, **chunks, n_hashes=1)),
        "lsh, 2 hashes": Made(of(lsh.lsh, **chunks, n_hashes=2)),
        "lsh, 8 hashes": Made(of(lsh.lsh, **chunks, n_hashes=8)),
        "asymmetric_lsh": Made(of(asymmetric_lsh.asymmetric_lsh, **chunks, n_hashes=4)),
        "smyrf": Made(of(smyrf.smyrf, chunk_len=half, n_hashes=4)),
        "hash_sparse": Made(of(hash_sparse.hash_sparse, n_buckets=16)),
    }

    marked = dict(n_global=shape.n_global)
    windows = {
        "local": Made(of(local.local, chunk_len=half, window=half)),
        "local, chunks": Made(of(local.local, **chunks)),
        "local, chunks, packed": Made(of(local.local, **chunks), packed=True),
        "sinks": Made(of(sinks.sinks, window=half, n_sinks=4)),
        "longformer": Made(
            of(longformer.longformer, window=half + 1, **marked, global_projections=False),
            causal=False,
            **marked,
        ),
    }

    if this_gpu.is_hopper():  # "auto" does not take it
        for group, name in ((hashed, "lsh"), (windows, "local, chunks")):
            make = group[name].make
            group[f"{name}, impl='mosaic'"] = Made(
                lambda impl, make=make: make(impl="mosaic"), of(make, impl="xla")
            )

    sizes = dict(compression="mean", independent_kv=False, window=shape.block)
    sizes |= dict(block_size=4 * stride, n_selected=min(16, stride))
    native = of(nsa.nsa, **sizes, compress_len=2 * stride, compress_stride=stride)
    whole = of(nsa.nsa, **sizes, compress_len=4 * stride, compress_stride=4 * stride)
    chosen = {
        "moba": Made(of(moba.moba, block_size=shape.block, top_k=3)),
        "nsa": Made(native, dense="flash, 1 head of keys", **one),
        "nsa, a mean a block": Made(whole, dense="flash, 1 head of keys", **one),
        "nsa, 64 heads of 128": Made(native, dense="flash, 64 heads of 128", **four),
        "dsa": Made(of(dsa.dsa, top_k=half, d_index=shape.d_head)),
    }

    blocks = {
        name: Made(of(block_sparse.block_sparse, pattern=pattern, block_size=max(16, chunk_len)))
        for name, pattern in PATTERNS.items()
    }

    plain = dict(normalized=False, gated=False)  # what other recurrences compute
    features = of(performer.performer, n_features=N_FEATURES, epsilon=epsilon)
    linear_time = {
        "linear": Made(linear.linear),
        "gated_linear": Made(of(gated_linear.gated_linear, **plain)),
        "gated_delta": Made(of(gated_delta.gated_delta, **plain)),
        "kda": Made(of(kda.kda, **plain)),
        "retention": Made(of(retention.retention, **plain)),
        "performer": Made(features),
        "performer, all": Made(features, causal=False),
        "linformer": Made(of(linformer.linformer, n_projected=256), causal=False),
        "nystromformer": Made(of(nystromformer.nystromformer, n_landmarks=64), causal=False),
        "long_short": Made(long_short.long_short),
        "long_short, all": Made(long_short.long_short, causal=False),
    }
    if jax_linear_attention.is_installed():
        for name in jax_linear_attention.KINDS:
            make = linear_time[name].make
            linear_time[f"jax-linear-attention, {name}"] = Made(
                lambda impl, make=make: jax_linear_attention.Peer(make(impl="xla")),
                of(make, impl="xla"),
            )
    return {
        "exact": exact,
        "hashed": hashed,
        "windows": windows,
        "chosen": chosen,
        "indexed": _indexed(shape),
        "blocks": blocks,
        "linear_time": linear_time,
    }


def _indexed(shape: Shape) -> dict[str, Made]:
    """What an indexer chooses: of one head of keys as in DeepSeek's models, of a fourth, of all.

    A query sees four blocks, or one where its heads are the run's: half of what a check has, so
    that there is a choice. Hashes and blocks find twice as many candidates, or more.
    """
    many, few, whole = 4 * shape.block, shape.block, max(2, shape.block // 8)
    of_one = dict(n_kv_heads=1, heads=(32, 128), dense="flash, 32 heads of 128 on 1")
    of_one |= dict(check_length=max(shape.check_length, 2 * many))
    of_two = dict(n_kv_heads=2, dense="flash, 2 heads of keys")

    def choice(top_k: int, found: candidates.Candidates | None = None, **options: Any) -> Callable:
        return functools.partial(dsa.dsa, top_k=top_k, indexer=Indexer(candidates=found, **options))

    hashes = {n: candidates.Hashed(n_nearest=max(2, n // 8)) for n in (many, few)}
    pooled = candidates.Pooled(block_sizes=(2 * whole,), n_blocks=64)
    summaries = functools.partial(csa.csa, top_k=few, window=max(4, few // 4))
    return {
        "dsa, 1 head of keys": Made(choice(many), **of_one),
        "dsa, bfloat16": Made(choice(many, dtype="bfloat16"), **of_one),
        "dsa, blocks": Made(choice(many, block_size=whole), **of_one),
        "dsa, hashed": Made(choice(many, hashes[many], dtype="bfloat16"), **of_one),
        "dsa, hashed, a fourth": Made(choice(few, hashes[few], dtype="bfloat16"), **of_one),
        "dsa, pooled": Made(choice(many, pooled, dtype="bfloat16"), **of_one),
        "csa": Made(summaries, **of_one),
        "hca": Made(hca.hca, **of_one),
        "dsa, 2 heads of keys": Made(choice(few), **of_two),
        "dsa, bfloat16, 2 heads of keys": Made(choice(few, dtype="bfloat16"), **of_two),
        "dsa, blocks, 2 heads of keys": Made(choice(few, block_size=whole), **of_two),
        "csa, 2 heads of keys": Made(summaries, **of_two),
        "dsa, all heads of keys": Made(choice(few)),
    }


def row(name: str, shape: Shape, **options: float) -> Made:
    """The row of this name."""
    (found,) = (group[name] for group in algorithms(shape, **options).values() if name in group)
    return found


def other_impl() -> str:
    """The implementation that "auto" does not take here: the one to check it against."""
    return INTERPRETED if jax.default_backend() == "cpu" else "xla"


# The arrays of a row, and its passes.

# Weights that have the names of arrays of a call.
_WEIGHTS = {"k": "weights of k", "v": "weights of v"}


def inputs_of(made: Made, shape: Shape, length: int) -> dict[str, Any]:
    """Random inputs and the op's own weights by name, and the cotangent `d_out`."""
    op, batch = made.make(impl="xla"), shape.batch(length)
    heads = made.heads or (shape.n_heads, shape.d_head)
    sizes = dict(dtype=shape.dtype, n_kv_heads=made.n_kv_heads)
    q, k, v, d_out = rows.inputs(batch, length, *heads, **sizes)
    dims = op.dims(q, v)
    drawn = {
        name: jax.random.normal(jax.random.fold_in(rows.KEY, i), (batch, length, x.n_heads, x.size))
        for i, (name, x) in enumerate(op.extra_projections(dims).items())
    }
    keys = {} if op.shared_qk else {"k": k}
    of_call = jax.tree.map(lambda x: x.astype(shape.dtype), drawn)
    params = {_WEIGHTS.get(name, name): x for name, x in dict(op.init(rows.KEY, dims)).items()}
    return {"q": q} | keys | {"v": v, "d_out": d_out} | of_call | params


def call_of(op: AttentionOp, made: Made, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call besides queries, keys and values."""
    q = inputs["q"]
    projected = op.extra_projections(op.dims(q, inputs["v"]))
    extra = {name: inputs[name] for name in projected}
    names = {other: name for name, other in _WEIGHTS.items()}
    params = {names.get(n, n): x for n, x in inputs.items() if n not in (*"qkv", *extra)}
    call = dict(causal=made.causal, rng=rows.KEY, params=params or ())
    call |= dict(extra_projections=extra) if extra else {}
    if made.packed:
        call["segment_ids"] = documents(q)
    if made.n_global:
        call["global_tokens"] = global_tokens(q, made.n_global)
    return call


def global_tokens(q: Array, n: int) -> Array:
    """The first `n` tokens of each row."""
    # A 0 that a compiler does not know: it would compute for minutes with constants.
    zero = 0 * lax.stop_gradient(q[0, 0, 0, 0])
    first = (jnp.arange(q.shape[1]) < n + zero).astype(jnp.int32)
    return jnp.broadcast_to(first, q.shape[:2])


def documents(q: Array) -> Array:
    """The segments of rows of seven documents, each longer than the one before, and padding."""
    length = q.shape[1]
    ends = length * jnp.cumsum(jnp.arange(1, 8)) // 30
    ids = 1 + jnp.searchsorted(ends, jnp.arange(length), side="right")
    return jnp.broadcast_to(jnp.where(ids > len(ends), 0, ids).astype(jnp.int32), q.shape[:2])


def passes(op: AttentionOp, made: Made) -> tuple[Callable, Callable]:
    """`attend(inputs)`, and `gradient(d_out, inputs)` with respect to each of the inputs."""

    def attend(inputs):
        q, k, v = (inputs.get(name) for name in "qkv")
        return op(q, k, v, **call_of(op, made, inputs))

    def gradient(d_out, inputs):
        return jax.grad(lambda x: jnp.sum(attend(x) * d_out))(inputs)

    return attend, gradient


# What is right.


def numbers(name: str, shape: Mapping[str, Any], folder: str, limit: float) -> Iterator[Answer]:
    """Writes to `{name}.npz` what a row's peers have to compute. It is meant for a CPU.

    These are its inputs, rounded to its dtype, its output `out` and its gradients, such as `d q`,
    of array operations in float32.
    """
    sizes = Shape(**shape)
    yield stage(f"{name}: array operations in float32", limit)
    save(Path(folder) / f"{name}.npz", expected(row(name, sizes), sizes))
    if name.startswith("performer"):
        # Peers add their epsilon to other features than ours: they agree without it.
        yield stage(f"{name}: the same without its epsilon", limit)
        found = expected(row(name, sizes, epsilon=1e-12), sizes)
        key = jax.random.key(0, impl="threefry2x32")  # Performer's own seed
        found["directions"] = np.asarray(orthogonal_directions(key, N_FEATURES, sizes.d_head))
        save(Path(folder) / f"{name}, no epsilon.npz", found)


def expected(made: Made, shape: Shape) -> dict[str, np.ndarray]:
    """The arrays of `numbers`."""
    given = inputs_of(made, shape._replace(tokens=1), made.check_length or shape.check_length)
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    d_out = inputs.pop("d_out")
    attend, gradient = passes(made.make(impl="xla"), made)
    with jax.default_matmul_precision("highest"):
        out, gradients = jax.jit(attend)(inputs), jax.jit(gradient)(d_out, inputs)
    found = {"d_out": d_out} | inputs | {"out": out}
    return jax.tree.map(np.asarray, found | {f"d {name}": x for name, x in gradients.items()})


def check(made: Made, shape: Shape, spoil: Callable = lambda op: op) -> list[float]:
    """The errors of an op's output and gradients against its reference in float32.

    Both get the plan of the op. spoil: changes it, for tests.

    Raises:
      ArithmeticError: an error is more than `TOLERANCE`, or the reference plans otherwise.
    """
    op = spoil(made.make(impl="auto"))
    reference = made.reference() if made.reference else made.make(impl=other_impl())
    inputs = inputs_of(made, shape._replace(tokens=1), made.check_length or shape.check_length)
    d_out = inputs.pop("d_out")
    # XLA would time many versions of each product of the array operations.
    untuned = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None

    def planned(op: AttentionOp, inputs: dict[str, Any]) -> Any:
        call = dict(segment_ids=None) | call_of(op, made, inputs)
        call.pop("extra_projections", None)
        return op.plan(call.pop("params"), inputs["q"], inputs.get("k"), train=True, **call)

    def computed(op: AttentionOp, inputs: dict[str, Any]) -> tuple[Array, Any]:
        def attend(inputs):
            call = dict(segment_ids=None) | call_of(op, made, inputs)
            call.pop("global_tokens", None)  # the plan has them
            q, k, v = (inputs.get(name) for name in "qkv")
            return op.apply(call.pop("params"), q, k, v, plan=plan, dropout=0.0, **call)

        def run(inputs):
            out, vjp = jax.vjp(attend, inputs)
            return out, vjp(d_out.astype(out.dtype))[0]

        return jax.jit(run, compiler_options=untuned)(inputs)

    with jax.default_matmul_precision("highest"):
        plan, other_plan = (jax.jit(functools.partial(planned, x))(inputs) for x in (op, reference))
        if isinstance(plan, Order):
            check_order(plan, other_plan)
        elif isinstance(plan, jax.Array):
            check_chosen(plan, other_plan)
        got = computed(op, inputs)
        want = computed(reference, jax.tree.map(lambda x: x.astype(jnp.float32), inputs))
    errors = [
        max(map(rows.relative_error, *map(jax.tree.leaves, x))) for x in zip(got, want, strict=True)
    ]
    for what, error in zip(("output", "gradient"), errors, strict=True):
        if not error <= TOLERANCE[shape.dtype]:
            raise ArithmeticError(
                f"the {what} in {shape.dtype} is {error:.2g} off, more than "
                f"{TOLERANCE[shape.dtype]:g}"
            )
    return errors


def check_order(order: Order, reference: Order) -> None:
    """Raises `ArithmeticError` unless nearly all positions have about the same place in both."""
    if not jnp.all(jnp.sort(order.query_positions) == jnp.arange(order.query_positions.shape[-1])):
        raise ArithmeticError("the plan is no permutation")
    places = (jnp.argsort(x.query_positions, axis=-1) for x in (order, reference))
    share = float(jnp.mean(jnp.abs(jnp.subtract(*places)) <= NEAR))
    if share < NEAR_SHARE:
        raise ArithmeticError(f"the plan has {share:.1%} of positions near their places")


def check_chosen(chosen: Array, reference: Array) -> None:
    """Raises `ArithmeticError` unless nearly all queries choose the same, in any order."""
    same = (jnp.sort(x, axis=-1) for x in (chosen, reference))
    share = float(jnp.mean(jnp.all(jnp.equal(*same), axis=-1)))
    if share < SAME_SHARE:
        raise ArithmeticError(f"the plan has {share:.1%} of the queries choose the same")


# Times.


class Programs(NamedTuple):
    """The compiled programs of a row at a length: its inputs and both passes."""

    inputs: Any
    forward: Any
    gradient: Any
    temp_mib: float


def compile_row(made: Made, shape: Shape, length: int) -> Programs:
    """All programs, side by side."""
    make = functools.partial(inputs_of, made, shape, length)
    inputs = jax.eval_shape(make)
    d_out = inputs.pop("d_out")
    attend, gradient = passes(made.make(impl="auto"), made)
    programs = (
        lambda: compiled(jax.jit(gradient).lower(d_out, inputs)),
        lambda: compiled(jax.jit(attend).lower(inputs)),
        lambda: compiled(jax.jit(make).lower()),
    )
    with ThreadPoolExecutor(len(programs)) as pool:
        gradient, forward, made = (x.result() for x in [pool.submit(p) for p in programs])
    return Programs(made.call, forward.call, gradient.call, gradient.temp_mib)


def measure(programs: Programs, repeats: int) -> rows.Result:
    """The figures of a row."""
    inputs = programs.inputs()
    d_out = inputs.pop("d_out")
    forward = functools.partial(programs.forward, inputs)
    gradient = functools.partial(programs.gradient, d_out, inputs)
    return rows.measure(forward, gradient, programs.temp_mib, repeats, MOST)


def by_length(
    name: str,
    shape: Mapping[str, Any],
    lengths: Sequence[int],
    known: Mapping[str, Sequence[float]],
    known_errors: Sequence[float] | None,
    repeats: int,
    folder: str,
    limit: float,
) -> Iterator[Answer]:
    """The figures of a row at lengths that are compiled together.

    Args:
      name: of the row.
      shape: a `Shape`.
      lengths: in the order of the measuring.
      known: milliseconds of the gradient and MiB at other lengths.
      known_errors: of the row's check, if it was made.
      repeats: timed calls.
      folder: of the file `lock`, held by who times alone, and by those who compile together.
      limit: seconds of a stage.
    """
    sizes, lock, errors = Shape(**shape), Path(folder) / "lock", known_errors
    made, most = row(name, sizes), memory.available() / 2**20
    measured = {int(n): tuple(x) for n, x in known.items()}
    why = {n: left_out(measured, n, most) for n in lengths}
    yield from ({"name": name, "length": n, "error": reason(x)} for n, x in why.items() if x)
    work = {n: n for n in lengths if not why[n]}
    if not work:
        return
    with together(lock):
        yield stage(f"{name}: compile {', '.join(map(str, work))}", limit)
        found = attempt_each(functools.partial(compile_row, made, sizes), work, len(work))
        if errors is None:  # not beside them: no program may run while one with cuDNN's is loaded
            yield stage(f"{name}: check", limit)
            errors = attempt(check, made, sizes)
    if isinstance(errors, Exception):
        found = dict.fromkeys(found, errors)
    yield stage(f"{name}: wait for the device")
    with alone(lock):
        yield from timed(name, found, lambda one, _: measure(one, repeats), errors, limit)
