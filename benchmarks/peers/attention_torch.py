"""Attentions in PyTorch: the peers of `benchmarks.attention`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness.calls import MIB, attempt, reason, time_calls
from benchmarks.harness.processes import Answer, alone, stage, wait_for
from benchmarks.peers import names, triton_tuning
from benchmarks.peers.torch_calls import DEVICE, wait

Given = Mapping[str, torch.Tensor]  # the inputs and weights of our row, by name

# The largest error of a peer's output or gradient, of the largest number of an array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 2e-3}
N_SINKS, N_HASHES = 4, 4
# Compiled whole or not at all: a graph that breaks would run uncompiled. Anew for each mask.
torch._dynamo.config.recompile_limit = 256
compiled_flex_attention = torch.compile(flex_attention, fullgraph=True, dynamic=False)


class Peer(NamedTuple):
    """An attention, `attend(*inputs)`, and its inputs, of which gradients are taken."""

    attend: Callable[..., Any]
    inputs: tuple[Any, ...]


class Sizes(NamedTuple):
    """What `benchmarks.rows.attention.algorithms` makes of a shape's `block` and `n_global`."""

    block: int
    n_global: int

    @property
    def window(self) -> int:
        return self.block // 2

    @property
    def chunk_len(self) -> int:
        return self.block // 4

    @property
    def pattern_block(self) -> int:
        return max(16, self.chunk_len)

    @property
    def stride(self) -> int:
        return max(2, self.window // 16)


# In linear time.


def fla_linear(given: Given) -> Peer:
    from fla.ops.linear_attn import chunk_linear_attn

    features = (functional.elu(given[name].float()) + 1 for name in "qk")
    inputs = *(x.to(given["v"].dtype) for x in features), given["v"]
    return Peer(lambda *qkv: chunk_linear_attn(*qkv)[0], inputs)


def fla_retention(given: Given) -> Peer:
    from fla.ops.retention import chunk_retention

    return Peer(lambda *qkv: chunk_retention(*qkv)[0], tuple(given[name] for name in "qkv"))


def fla_gated_linear(given: Given) -> Peer:
    from fla.ops.gla import chunk_gla

    gate = functional.logsigmoid((given["gate"] + given["bias"]).float()) / 16
    inputs = *(given[name] for name in "qkv"), gate.to(given["v"].dtype)
    return Peer(lambda *qkvg: chunk_gla(*qkvg)[0], inputs)


def fla_gated_delta(given: Given) -> Peer:
    """It refuses the gradient on Hopper GPUs with Triton 3.4 to 3.7: `check` tells its error."""
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True

    keep, beta = (given[name][..., 0].float() for name in ("keep", "beta"))
    gate = given["rate"].float().exp() * functional.logsigmoid(keep - given["bias"])

    def attend(*inputs):
        return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    beta = beta.sigmoid().to(given["v"].dtype)
    return Peer(attend, (*(given[name] for name in "qkv"), gate, beta))


def from_inputs(make: Callable[[Given], Peer]) -> Callable[[Given], Peer]:
    """A peer whose features or gates are computed in the call."""

    def whole(given: Given) -> Peer:
        def attend(*inputs):
            peer = make(dict(zip(given, inputs, strict=True)))
            return peer.attend(*peer.inputs)

        return Peer(attend, tuple(given.values()))

    return whole


def heads_first(given: Given) -> tuple[torch.Tensor, ...]:
    """q, k and v as `[1, N, T, H]`."""
    return tuple(given[name].transpose(1, 2) for name in "qkv")


def lucidrains_linear(given: Given) -> Peer:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    return Peer(causal_linear_attn, heads_first(given))


def lucidrains_performer(causal: bool, given: Given) -> Peer:
    """Its causal attention without fast_transformers' kernel, which no registry has built."""
    from performer_pytorch import performer_pytorch as code

    prefix_sums = functools.partial(code.causal_linear_attention_noncuda, eps=0.0)
    sums = prefix_sums if causal else code.linear_attention
    options = dict(projection_matrix=given["directions"].detach(), eps=0.0)

    def attend(q, k, v):
        queries = code.softmax_kernel(q, is_query=True, **options)
        return sums(queries, code.softmax_kernel(k, is_query=False, **options), v)

    return Peer(attend, heads_first(given))


class Third(nn.Module):
    """In the place of a projection: queries, keys or values, side by side in the input."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, x):
        return x.chunk(3, dim=-1)[self.index]


def side_by_side(given: Given) -> torch.Tensor:
    """q, k and v as `[1, T, 3 N H]`."""
    return torch.cat([given[name].flatten(2) for name in "qkv"], dim=-1)


def lucidrains_linformer(given: Given) -> Peer:
    from linformer import LinformerSelfAttention

    length, n_heads, d_head = given["q"].shape[1:]
    n_projected = given["e"].shape[1]
    layer = LinformerSelfAttention(n_heads * d_head, 1, k=n_projected, heads=n_heads)
    layer.seq_len, layer.to_out = length, nn.Identity()
    layer.to_q, layer.to_k, layer.to_v = map(Third, range(3))
    del layer.proj_k, layer.proj_v

    def attend(x, e, f):
        layer.proj_k, layer.proj_v = e, f
        return layer(x)

    return Peer(attend, (side_by_side(given), given["e"], given["f"]))


def lucidrains_nystrom(given: Given) -> Peer:
    from nystrom_attention import NystromAttention

    n_heads, d_head = given["q"].shape[2:]
    sizes = dict(dim_head=d_head, heads=n_heads, num_landmarks=64, residual=False)
    layer = NystromAttention(n_heads * d_head, **sizes)
    layer.to_qkv = layer.to_out = nn.Identity()
    return Peer(layer, (side_by_side(given),))


# By a mask.


def with_mask(visible: Callable[..., Any], given: Given, **options: int) -> Peer:
    """FlexAttention to the pairs that `visible` shows."""
    length = given["q"].shape[1]
    mask = create_block_mask(visible, None, None, length, length, DEVICE, _compile=True, **options)
    return Peer(functools.partial(compiled_flex_attention, block_mask=mask), heads_first(given))


def flex_local(given: Given, sizes: Sizes) -> Peer:
    """A query's own chunk and the one before."""

    def visible(batch, head, query, key):
        chunks = query // sizes.chunk_len - key // sizes.chunk_len
        return (key <= query) & (chunks <= 1)

    return with_mask(visible, given, BLOCK_SIZE=sizes.pattern_block)


def flex_longformer(given: Given, sizes: Sizes) -> Peer:
    def visible(batch, head, query, key):
        near = (query - key).abs() <= sizes.window
        return near | (query < sizes.n_global) | (key < sizes.n_global)

    return with_mask(visible, given)


def flex_sinks(given: Given, sizes: Sizes) -> Peer:
    def visible(batch, head, query, key):
        return (key <= query) & ((query - key < sizes.window) | (key < N_SINKS))

    return with_mask(visible, given)


def _butterfly(query, key):
    bits = query ^ key
    return (bits & (bits - 1)) == 0


def _strided(query, key):
    distance = (query - key).abs()
    return (distance <= 16) | (distance % 16 == 0)


def _fixed(query, key):
    return (query // 16 == key // 16) | (key % 16 == 15)


def _local_global(query, key):
    return (query - key <= 3) | (key == 0)


def flex_blocks(rule: Callable[..., Any], given: Given, sizes: Sizes) -> Peer:
    """The causal pairs of the blocks that a rule of `benchmarks.rows.attention.PATTERNS` shows."""
    size = sizes.pattern_block

    def visible(batch, head, query, key):
        return (key <= query) & rule(query // size, key // size)

    return with_mask(visible, given, BLOCK_SIZE=size)


# By hashes: other keys than ours.


def hugging_face_lsh(given: Given, sizes: Sizes) -> Peer:
    """LSH attention of transformers, whose layer projects its input itself."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    x = given["q"].flatten(2)
    length, n_heads, d_head = given["q"].shape[1:]
    config = ReformerConfig(
        hidden_size=n_heads * d_head,
        num_attention_heads=n_heads,
        attention_head_size=d_head,
        num_hashes=N_HASHES,
        num_buckets=None,
        lsh_attn_chunk_length=sizes.chunk_len,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config).to(x.device, x.dtype)
    return Peer(lambda x: layer(x).hidden_states, (x,))


def lucidrains_lsh(given: Given, sizes: Sizes) -> Peer:
    """LSH attention of reformer_pytorch."""
    from reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=sizes.chunk_len, n_hashes=N_HASHES, causal=True).to(DEVICE)
    qk, v = (given[name].transpose(1, 2) for name in "qv")

    def attend(qk, v):
        return layer(qk.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, qk.shape[:2])

    return Peer(attend, (qk, v))


# By chosen blocks and global tokens.


class Instead(nn.Module):
    """In the place of a projection: the given vectors, or its input."""

    def __init__(self, x: torch.Tensor | None = None):
        super().__init__()
        self.x = x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.x is None else self.x).clone()  # it is divided in its place


def hugging_face_longformer(given: Given, sizes: Sizes) -> Peer:
    """transformers' layer without its projections, whose input are queries."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    batch, length, n_heads, size = given["q"].shape
    config = LongformerConfig(
        hidden_size=n_heads * size,
        num_attention_heads=n_heads,
        attention_window=[2 * sizes.window],
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0).to(DEVICE).eval()
    mask = torch.zeros(batch, length, device=DEVICE, dtype=given["q"].dtype)
    mask[:, : sizes.n_global] = 10_000.0
    layer.query, layer.query_global = Instead(), Instead()

    def attend(q, k, v):
        for name, x in (("key", k), ("value", v)):
            x = x.flatten(2).transpose(0, 1)
            setattr(layer, name, Instead(x))
            setattr(layer, f"{name}_global", Instead(x))
        return layer(
            q.flatten(2),
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=True,
        )[0]

    return Peer(attend, tuple(given[name] for name in "qkv"))


# flash-linear-attention calls flash-attn, which is not built for every PyTorch. PyTorch has the
# same kernels under other names.


def _forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    dropout_p=0.0,
    **windows,
):
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
        **windows,
    )
    if cu_seqlens_q is not None and found[1].shape != (q.shape[1], q.shape[0]):
        raise NotImplementedError(f"sums have shape {tuple(found[1].shape)}")
    return *found[:2], None, None


def _backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    dropout_p,
    **others,
):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        state,
        torch.zeros((), dtype=torch.uint64, device=q.device),
        scale=softmax_scale,
    )
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x)


def flash_attn_func(q, k, v, causal, window_size):
    left, right = window_size
    length = q.shape[1]
    windows = dict(window_size_left=left, window_size_right=right)
    return _forward(q, k, v, None, None, length, length, None, causal, 0.0, **windows)[0]


def flash_attn_varlen_func(*args, causal=False):
    return _forward(*args, causal=causal)[0]


def fla_with_flash_attn(name: str) -> Any:
    """The module of flash-linear-attention's op, which then calls PyTorch's copy of the kernels."""
    module = importlib.import_module(f"fla.ops.{name}.parallel")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = _forward, _backward
    return module


def fla_moba(given: Given, sizes: Sizes) -> Peer:
    parallel_moba = fla_with_flash_attn("moba").parallel_moba
    length = given["q"].shape[1]
    ends = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)

    def attend(q, k, v):
        return parallel_moba(q, k, v, ends, length, sizes.block, 3)

    return Peer(attend, tuple(given[name] for name in "qkv"))


def fla_nsa(given: Given, sizes: Sizes) -> Peer:
    """It gets its gates; ours computes them of its inputs."""
    parallel_nsa = fla_with_flash_attn("nsa").parallel_nsa
    stride = sizes.stride
    options = dict(block_counts=min(16, stride), block_size=4 * stride, window_size=sizes.block)

    def attend(q, k, v, gate):
        return parallel_nsa(q, k, v, *gate.unbind(-1), **options)

    return Peer(attend, (*(given[name] for name in "qkv"), given["gate"].sigmoid()))


class Case(NamedTuple):
    """A peer.

    Attributes:
      make: the attention and its inputs, made of our row's and, if `sized`, of `Sizes`. It keeps
        the order of positions and heads, and may merge heads or have them before positions.
      sized: as above.
      same: False where it computes something else, of the same inputs.
      dtype: the only one that it runs in; None for any.
      checked: the dtype that it is checked in; None for the one that it is timed in.
      numbers: those of our row that it is given and checked against, where not its own.
      by_head: whether it is checked with one head alone, because heads share something.
      any_gradient: whether it is timed even where its gradients are wrong, with their error.
      agree: the share of an array's rows that must agree; below 1 where near scores choose others.
    """

    make: Callable[..., Peer]
    sized: bool = False
    same: bool = True
    dtype: str | None = None
    checked: str | None = None
    numbers: str | None = None
    by_head: bool = False
    any_gradient: bool = False
    agree: float = 1.0


_of = functools.partial
CASES = {
    "fla gated_linear": Case(fla_gated_linear),
    "fla gated_delta": Case(fla_gated_delta, any_gradient=True),
    "fla linear": Case(fla_linear),
    "fla retention": Case(fla_retention),
    "fla linear, from inputs": Case(from_inputs(fla_linear)),
    "fla gated_linear, from inputs": Case(from_inputs(fla_gated_linear)),
    "fla gated_delta, from inputs": Case(from_inputs(fla_gated_delta), any_gradient=True),
    "fla nsa": Case(fla_nsa, sized=True, agree=0.9),
    "fla moba": Case(fla_moba, sized=True, agree=0.9),
    "FlexAttention, local": Case(flex_local, sized=True),
    "FlexAttention, longformer": Case(flex_longformer, sized=True),
    "FlexAttention, sinks": Case(flex_sinks, sized=True),
    "FlexAttention, butterfly": Case(_of(flex_blocks, _butterfly), sized=True),
    "FlexAttention, strided": Case(_of(flex_blocks, _strided), sized=True),
    "FlexAttention, fixed": Case(_of(flex_blocks, _fixed), sized=True),
    "FlexAttention, local + global": Case(_of(flex_blocks, _local_global), sized=True),
    "transformers Longformer": Case(hugging_face_longformer, sized=True),
    "transformers LSH": Case(hugging_face_lsh, sized=True, same=False),
    "reformer_pytorch LSH": Case(lucidrains_lsh, sized=True, same=False),
    "performer-pytorch": Case(
        _of(lucidrains_performer, True), checked="float32", numbers="performer, no epsilon"
    ),
    "performer-pytorch, all": Case(
        _of(lucidrains_performer, False), checked="float32", numbers="performer, all, no epsilon"
    ),
    "linformer, PyTorch": Case(lucidrains_linformer),
    # Its pseudo-inverse begins with the largest norm of all heads, and is in float32.
    "nystrom-attention, float32": Case(lucidrains_nystrom, dtype="float32", by_head=True),
    "linear-attention-transformer": Case(lucidrains_linear, same=False),
}


class Run(NamedTuple):
    """What the processes of peers are asked: the folder of numbers, and `Shape` of our rows."""

    folder: Path
    shape: Mapping[str, Any]

    def made(self, case: Case, given: Given) -> Peer:
        sizes = Sizes(self.shape["block"], self.shape["n_global"])
        return case.make(given, sizes) if case.sized else case.make(given)

    def file(self, name: str) -> str:
        """The name of the file of the numbers of a peer, without its ending."""
        return CASES[name].numbers or names.PEERS[name].of

    def numbers(self, name: str) -> dict[str, np.ndarray]:
        """Inputs, weights, output and gradients of our row at a length."""
        with np.load(self.folder / f"{self.file(name)}.npz") as arrays:
            return dict(arrays)


def tensors(arrays: Given | Mapping[str, np.ndarray], dtype: str) -> dict[str, torch.Tensor]:
    """Leaves of which gradients can be taken."""
    options = dict(device=DEVICE, dtype=getattr(torch, dtype))
    return {name: torch.as_tensor(x, **options).requires_grad_() for name, x in arrays.items()}


def check(run: Run, name: str) -> list[float]:
    """The errors of the output and of the gradients, where a peer computes what our row does.

    Raises:
      ArithmeticError: an error is more than `TOLERANCE`, or a number is not finite.
    """
    case, known = CASES[name], run.numbers(name)
    dtype = case.checked or case.dtype or run.shape["dtype"]
    if case.by_head:
        known = {name: x[:, :, :1] for name, x in known.items()}
    given = tensors({n: known[n] for n in inputs_of(known)}, dtype)
    d_out = torch.tensor(known["d_out"], device=DEVICE, dtype=getattr(torch, dtype))
    peer = run.made(case, given)
    out = peer.attend(*peer.inputs)
    if out.ndim == 3:
        out = out.unflatten(-1, d_out.shape[2:])
    elif out.shape != d_out.shape:
        out = out.transpose(1, 2)
    gradients = torch.autograd.grad(out, tuple(given.values()), d_out, allow_unused=True)
    got = {f"d {n}": x for n, x in zip(given, gradients, strict=True) if x is not None}
    if out.shape != d_out.shape or not all(x.isfinite().all() for x in (out, *got.values())):
        raise ArithmeticError(f"shape {tuple(out.shape)}, or a number that is not finite")
    if not case.same:
        return []
    if missing := [name for name in known if name.startswith("d ") and name not in got]:
        raise ArithmeticError(f"no gradient: {', '.join(missing)}")

    def error(got: torch.Tensor, want: np.ndarray) -> float:
        difference = np.abs(got.detach().double().cpu().numpy() - want).max(axis=-1)
        return float(np.quantile(difference, case.agree) / max(1.0, np.abs(want).max()))

    errors = [error(out, known["out"]), max(error(x, known[name]) for name, x in got.items())]
    if not max(errors[:1] if case.any_gradient else errors) <= TOLERANCE[dtype]:
        raise ArithmeticError(f"{dtype}: {errors} off, more than {TOLERANCE[dtype]:g}")
    return errors


def inputs_of(known: Mapping[str, np.ndarray]) -> list[str]:
    """The names of the inputs and weights among the arrays of a row."""
    return [n for n in known if n not in ("d_out", "out") and not n.startswith("d ")]


def longer(x: np.ndarray, shape: Mapping[str, Any], length: int) -> torch.Tensor:
    """Random numbers of the size of x, for sequences of another length, as many as `tokens`."""
    known, batch = shape["check_length"], max(1, shape["tokens"] // length)
    if known not in x.shape:
        return torch.tensor(x, device=DEVICE)
    size = [length if n == known else n for n in x.shape]
    if x.shape[:2] == (1, known):
        size[0] = batch
    return torch.randn(size, device=DEVICE) * float(x.std())


def compile_and_check(
    name: str,
    index: int,
    folder: str,
    shape: Mapping[str, Any],
    lengths: Sequence[int],
    limit: float,
) -> Iterator[Answer]:
    """Compiles a peer, or its share of a peer's kernels, and checks it.

    What is compiled is kept on the disk.
    """
    run, triton = Run(Path(folder), shape), names.PEERS[name].triton
    if triton is not None:
        triton_tuning.compile_share(index, triton)
    yield stage(f"{name}: wait for its numbers, {index}", 2 * limit)
    wait_for(run.folder, run.file(name))
    yield stage(f"{name}: compile and check, {index}", limit)
    errors = check(run, name)
    for length in lengths:
        yield stage(f"{name}: compile {length:,}, {index}", limit)
        timed(run, name, length, repeats=1, most=0.0)
    yield {"name": name, "errors": errors}


def by_length(
    folder: str,
    shape: Mapping[str, Any],
    lengths: Mapping[str, Sequence[int]],
    repeats: int,
    most: float,
    slow: float,
    limit: float,
) -> Iterator[Answer]:
    """The rows of peers, one after another.

    Args:
      folder: of the files of `benchmarks.rows.attention.numbers`, and of the file `lock`, held
        while nothing may be timed. A peer without numbers, or with a file `{name}.failed`, is left
        out.
      shape: `Shape` of our rows.
      lengths: those of each peer, by name.
      repeats: timed calls.
      most: seconds of the calls of a pass.
      slow: seconds of a gradient, above which longer sequences are left out.
      limit: seconds of a stage.
    """
    run = Run(Path(folder), shape)
    if any(names.PEERS[name].triton is not None for name in lengths):
        triton_tuning.tune_shortly()
    yield stage("peers: wait for the device")
    with alone(run.folder / "lock"):
        for name in lengths:
            failed = (run.folder / f"{name}.failed").exists()
            if failed or not (run.folder / f"{run.file(name)}.npz").exists():
                continue
            yield stage(f"{name}: tune and check", limit)
            error = None
            if names.PEERS[name].triton is not None:  # for 16 times the length of the numbers
                longer_one = 16 * run.shape["check_length"]
                error = attempt(timed, run, name, longer_one, 1, 0.0)
            error = error if isinstance(error, Exception) else attempt(check, run, name)
            for length in lengths[name]:
                yield stage(f"{name}: time {length:,}", limit)
                found = error
                if not isinstance(error, Exception):
                    found = attempt(timed, run, name, length, repeats, most)
                of = {"name": name, "of": names.PEERS[name].of, "length": length}
                if isinstance(found, Exception):
                    yield of | {"error": reason(found)}
                    continue
                yield of | found | {"errors": error}
                if found["gradient"].ms > slow * 1e3:
                    error = TimeoutError("left out: slow where it is shorter")


def timed(run: Run, name: str, length: int, repeats: int, most: float) -> dict[str, Any]:
    """The figures of a peer at a length."""
    case, arrays = CASES[name], run.numbers(name)
    arrays = {n: longer(arrays[n], run.shape, length) for n in inputs_of(arrays)}
    made = run.made(case, tensors(arrays, case.dtype or run.shape["dtype"]))
    inputs = tuple(x.detach().contiguous().requires_grad_() for x in made.inputs)
    try:
        return measure(Peer(made.attend, inputs), repeats, most)
    finally:
        del made, inputs
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def measure(peer: Peer, repeats: int, most: float) -> dict[str, Any]:
    """Times of both passes and, on a GPU, the gradient's peak allocation less the gradient.

    most: seconds of the calls of a pass, as in `time_calls`.
    """

    def forward():
        with torch.no_grad():
            return peer.attend(*peer.inputs)

    d_out = torch.randn_like(forward())

    def gradient():
        return torch.autograd.grad(peer.attend(*peer.inputs), peer.inputs, d_out)

    passes = {"forward": forward, "gradient": gradient}
    result: dict[str, Any] = {
        n: time_calls(call, wait, repeats, most) for n, call in passes.items()
    }
    result["temp_mib"] = None
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = gradient()
        kept = sum(x.numel() * x.element_size() for x in results)
        peak = torch.cuda.max_memory_allocated() - before
        result["temp_mib"] = (peak - kept) / MIB
    return result
