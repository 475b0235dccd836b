"""Attentions in linear time in PyTorch: the peers of `benchmarks.linear_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness.calls import attempt, reason
from benchmarks.harness.processes import Answer, alone, stage, wait_for
from benchmarks.peers import linear_names, triton_tuning
from benchmarks.peers.attention_torch import Peer, measure
from benchmarks.peers.torch_calls import DEVICE

Given = Mapping[str, torch.Tensor]  # the inputs and weights of our row, by name

# The largest error of a peer's output or gradient, of the largest number of an array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 2e-3}


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


class Case(NamedTuple):
    """A peer.

    Attributes:
      of: our row, which computes the same.
      make: the attention and its inputs, made of our row's. It keeps the order of positions and
        heads, and may merge heads or have them before positions.
      same: False where it computes something else, of the same inputs.
      dtype: the only one that it runs in; None for any.
      checked: the dtype that it is checked in; None for the one that it is timed in.
      numbers: those of our row that it is given and checked against, where not `of`.
      by_head: whether it is checked with one head alone, because heads share something.
      any_gradient: whether it is timed even where its gradients are wrong, with their error.
      agree: the share of an array's rows that must agree; below 1 where near scores choose others.
      triton: whether Triton chooses among versions of its kernels.
    """

    of: str
    make: Callable[[Given], Peer]
    same: bool = True
    dtype: str | None = None
    checked: str | None = None
    numbers: str | None = None
    by_head: bool = False
    any_gradient: bool = False
    agree: float = 1.0
    triton: bool = False


# What to call of each peer.
_CASES: dict[str, dict[str, Any]] = {
    "fla gated_linear": dict(make=fla_gated_linear),
    "fla gated_delta": dict(make=fla_gated_delta, any_gradient=True),
    "fla linear": dict(make=fla_linear),
    "fla retention": dict(make=fla_retention),
    "fla linear, from inputs": dict(make=from_inputs(fla_linear)),
    "fla gated_linear, from inputs": dict(make=from_inputs(fla_gated_linear)),
    "fla gated_delta, from inputs": dict(make=from_inputs(fla_gated_delta), any_gradient=True),
    "performer-pytorch": dict(
        make=functools.partial(lucidrains_performer, True),
        checked="float32",
        numbers="performer, no epsilon",
    ),
    "performer-pytorch, all": dict(
        make=functools.partial(lucidrains_performer, False),
        checked="float32",
        numbers="performer, all, no epsilon",
    ),
    "linformer, PyTorch": dict(make=lucidrains_linformer),
    # Its pseudo-inverse begins with the largest norm of all heads, and is in float32.
    "nystrom-attention, float32": dict(make=lucidrains_nystrom, dtype="float32", by_head=True),
    "linear-attention-transformer": dict(make=lucidrains_linear, same=False),
}
PEERS = {
    name: Case(known.of, triton=known.triton is not None, **_CASES[name])
    for name, known in linear_names.PEERS.items()
}


def tensors(arrays: Given | Mapping[str, np.ndarray], dtype: str) -> dict[str, torch.Tensor]:
    """Leaves of which gradients can be taken."""
    options = dict(device=DEVICE, dtype=getattr(torch, dtype))
    return {name: torch.as_tensor(x, **options).requires_grad_() for name, x in arrays.items()}


def check(case: Case, known: Mapping[str, np.ndarray], dtype: str) -> list[float]:
    """The errors of the output and of the gradients, where a peer computes what our row does.

    Raises:
      ArithmeticError: an error is more than `TOLERANCE`, or a number is not finite.
    """
    if case.by_head:
        known = {name: x[:, :, :1] for name, x in known.items()}
    given = tensors({n: known[n] for n in inputs_of(known)}, dtype)
    d_out = torch.tensor(known["d_out"], device=DEVICE, dtype=getattr(torch, dtype))
    peer = case.make(given)
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


def longer(x: np.ndarray, length: int, new_length: int) -> torch.Tensor:
    """Random numbers of the size of x, whose axis of positions has another length."""
    if new_length == length or length not in x.shape:
        return torch.tensor(x, device=DEVICE)
    size = [new_length if n == length else n for n in x.shape]
    return torch.randn(size, device=DEVICE) * float(x.std())


def numbers(case: Case, folder: str) -> dict[str, np.ndarray]:
    """Inputs, weights, output and gradients of our row at a length."""
    with np.load(Path(folder) / f"{case.numbers or case.of}.npz") as arrays:
        return dict(arrays)


def first_check(case: Case, folder: str, dtype: str) -> list[float]:
    """As `check`, in the dtype of the case."""
    return check(case, numbers(case, folder), case.checked or case.dtype or dtype)


def compile_and_check(
    folder: str, name: str, index: int, dtype: str, limit: float
) -> Iterator[Answer]:
    """Checks a peer with its share of its kernels, which Triton keeps on the disk."""
    case, triton = PEERS[name], linear_names.PEERS[name].triton
    if triton is not None:
        triton_tuning.compile_share(index, triton)
    yield stage(f"{name}: wait for its numbers, {index}", 2 * limit)
    wait_for(Path(folder), case.numbers or case.of)
    yield stage(f"{name}: compile and check, {index}", limit)
    yield {"name": name, "errors": first_check(case, folder, dtype)}


def by_length(
    folder: str,
    lengths: Sequence[int] | Mapping[str, Sequence[int]],
    dtype: str,
    repeats: int,
    most: float,
    slow: float,
    n_known: int,
    limit: float,
    cases: Mapping[str, Case] | None = None,
) -> Iterator[Answer]:
    """The rows of peers, one after another.

    Args:
      folder: of the files of `numbers`, and of the file `lock`, held while nothing may be timed.
      lengths: the lengths, ascending, those of each peer if they have names.
      dtype: of the inputs.
      repeats: timed calls.
      most: seconds of the calls of a pass.
      slow: seconds of a gradient, above which longer sequences are left out.
      n_known: the length of the arrays in the files.
      limit: seconds of a stage.
      cases: the peers; None: those of this file. Those without numbers are left out, and those with
        a file `{name}.failed`.
    """
    cases = PEERS if cases is None else cases
    if isinstance(lengths, Mapping):
        cases = {name: cases[name] for name in lengths}
    if any(case.triton for case in cases.values()):
        triton_tuning.tune_shortly()
    yield stage("peers: wait for the device")
    with alone(Path(folder) / "lock"):
        for name, case in cases.items():
            files = Path(folder)
            failed = (files / f"{name}.failed").exists()
            if failed or not (files / f"{case.numbers or case.of}.npz").exists():
                continue
            yield stage(f"{name}: tune and check", limit)
            error = None
            if case.triton:
                error = attempt(tune, case, folder, dtype, n_known)
            error = error or attempt(first_check, case, folder, dtype)
            for length in lengths[name] if isinstance(lengths, Mapping) else lengths:
                yield stage(f"{name}: time {length:,}", limit)
                found = error
                if not isinstance(error, Exception):
                    found = attempt(timed, case, folder, dtype, length, n_known, repeats, most)
                of = {"name": name, "of": case.of, "length": length}
                if isinstance(found, Exception):
                    yield of | {"error": reason(found)}
                    continue
                yield of | found | {"errors": error}
                if found["gradient"].ms > slow * 1e3:
                    error = TimeoutError("left out: slow where it is shorter")


def tune(case: Case, folder: str, dtype: str, n_known: int) -> None:
    """Has Triton choose its kernels for 16 times the length of the numbers."""
    timed(case, folder, dtype, 16 * n_known, n_known, repeats=1, most=0.0)


def timed(
    case: Case, folder: str, dtype: str, length: int, n_known: int, repeats: int, most: float
) -> dict[str, Any]:
    """The figures of a peer at a length."""
    arrays = numbers(case, folder)
    arrays = {n: longer(arrays[n], n_known, length) for n in inputs_of(arrays)}
    made = case.make(tensors(arrays, case.dtype or dtype))
    inputs = tuple(x.detach().contiguous().requires_grad_() for x in made.inputs)
    try:
        return measure(Peer(made.attend, inputs), repeats, most)
    finally:
        del made, inputs
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
