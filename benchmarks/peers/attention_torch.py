"""Attentions in PyTorch: the peers of `benchmarks.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness.calls import MIB, attempt, reason, time_calls
from benchmarks.harness.processes import Answer, alone, stage, wait_for
from benchmarks.peers import chosen_torch as chosen
from benchmarks.peers import linear_torch as linear
from benchmarks.peers import masked_torch as masked
from benchmarks.peers import names, triton_tuning
from benchmarks.peers.torch_calls import DEVICE, wait
from benchmarks.peers.torch_peer import Given, Peer, Sizes

# The largest error of a peer's output or gradient, of the largest number of an array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 2e-3}


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
    "fla gated_linear": Case(linear.fla_gated_linear),
    "fla gated_delta": Case(linear.fla_gated_delta, any_gradient=True),
    "fla linear": Case(linear.fla_linear),
    "fla retention": Case(linear.fla_retention),
    "fla linear, from inputs": Case(linear.from_inputs(linear.fla_linear)),
    "fla gated_linear, from inputs": Case(linear.from_inputs(linear.fla_gated_linear)),
    "fla gated_delta, from inputs": Case(
        linear.from_inputs(linear.fla_gated_delta), any_gradient=True
    ),
    "fla nsa": Case(chosen.fla_nsa, sized=True, agree=0.9),
    "fla moba": Case(chosen.fla_moba, sized=True, agree=0.9),
    "FlexAttention, local": Case(masked.flex_local, sized=True),
    "FlexAttention, longformer": Case(masked.flex_longformer, sized=True),
    "FlexAttention, sinks": Case(masked.flex_sinks, sized=True),
    "FlexAttention, butterfly": Case(_of(masked.flex_blocks, masked.butterfly), sized=True),
    "FlexAttention, strided": Case(_of(masked.flex_blocks, masked.strided), sized=True),
    "FlexAttention, fixed": Case(_of(masked.flex_blocks, masked.fixed), sized=True),
    "FlexAttention, local + global": Case(_of(masked.flex_blocks, masked.local_global), sized=True),
    "transformers Longformer": Case(chosen.hugging_face_longformer, sized=True),
    "transformers LSH": Case(chosen.hugging_face_lsh, sized=True, same=False),
    "reformer_pytorch LSH": Case(chosen.lucidrains_lsh, sized=True, same=False),
    "performer-pytorch": Case(
        _of(linear.lucidrains_performer, True),
        checked="float32",
        numbers="performer, no epsilon",
    ),
    "performer-pytorch, all": Case(
        _of(linear.lucidrains_performer, False),
        checked="float32",
        numbers="performer, all, no epsilon",
    ),
    "linformer, PyTorch": Case(linear.lucidrains_linformer),
    # Its pseudo-inverse begins with the largest norm of all heads, and is in float32.
    "nystrom-attention, float32": Case(linear.lucidrains_nystrom, dtype="float32", by_head=True),
    "linear-attention-transformer": Case(linear.lucidrains_linear, same=False),
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
