"""The benchmarks, on shapes that take no time."""

import functools
import importlib
import json
import math
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, block_sparse, exact_attention, generation, step
from benchmarks.harness import processes, rows, timing
from benchmarks.harness.failures import PeerError, reason
from benchmarks.peers import attention_torch, generation_torch, rabe_staats
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dense, lsh

(TINY,) = step.SHAPES["tiny"]
OURS, TRAX = step.REFORMER, f"{step.TRAX}, n_parallel_heads=1"
LINES = "one\n\ntwo words and more\nthree words here\n" * 4

# A command's flags, and the text that it prints once it has done everything.
COMMANDS = [
    ("attention", "--plot={path}/a.png --peers", "| transformers, LSH, 4 hashes, with"),
    ("attention", "--exact", "Rabe and Staats, as printed | 0."),
    ("block_sparse", "--plot={path}/a.png", "| all | 16 | 100.00% |"),
    ("duplication", "", "| LSH-1 |"),
    ("exact_attention", "--memory", "| 1,024 | 0.8 |"),
    ("exact_attention", "--curves", "| block_sparse, all blocks |"),
    ("exact_attention", "--longest", "| flash |"),
    ("generation", "", "| ordinary |"),
    ("recall", "--plot={path}/a.png", "| keys, noise 1 |"),
    ("reversible", "--plot={path}/a.png", "| float32 | exact | 0 | 0 of 1,024 |"),
    ("step", "", "| reformax TransformerLM, dense | 12,880 |"),
    ("translation", "--sources={path}/lines", "ImportError: none here |"),
    ("translation", "--sources={path}/lines --step", "| PyTorch, masks | ImportError: none here |"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, flags, last", COMMANDS)
def test_every_command_runs(name, flags, last, tmp_path, monkeypatch, capsys):
    """Peers in PyTorch are told that it is missing, wherever the tests run."""
    (tmp_path / "lines").write_text(LINES)
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--tiny", *flags.format(path=tmp_path).split()]
    importlib.import_module(f"benchmarks.{name}").main(flags)
    assert last in capsys.readouterr().out
    assert "--plot" not in flags or os.path.getsize(tmp_path / "a.png")


def test_no_benchmark_imports_another():
    folder = Path(step.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    assert len(files) > 20
    for path in files:
        for imported in re.findall(r"from benchmarks(\S*) import (.*)", path.read_text()):
            assert imported[0].startswith((".harness", ".peers")), (path, imported)


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def measured(rows, repeats):
    return step.measure(step.prepare(rows, TINY, threads=2), repeats)


@pytest.fixture(scope="module")
def results():
    rows = step.candidates(TINY)
    return measured({name: rows[name] for name in (OURS, TRAX)}, repeats=2)


@pytest.mark.slow
def test_both_train_and_are_of_one_size(results):
    ours, trax = results[OURS], results[TRAX]
    assert len(ours.seconds) == len(trax.seconds) == 2
    assert ours.n_weights == trax.n_weights


@pytest.mark.slow
def test_the_table_compares_with_trax_where_it_ran(results, capsys):
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    assert cells(table, "model")[-1] == "speed / Trax's, n_parallel_heads=1"
    ratio = results[TRAX].median / results[OURS].median
    assert cells(table, OURS)[-1] == f"{ratio:.2f}"
    assert cells(table, TRAX)[-1] == "1.00"
    step.print_table({OURS: results[OURS]}, TINY)
    alone = capsys.readouterr().out
    assert "Trax" not in alone
    assert len(cells(alone, OURS)) == len(cells(alone, "model"))


def test_rows_without_peers_are_reformax_alone():
    rows = step.candidates(TINY, peers=False)
    assert rows and not any(step.TRAX in name for name in rows)
    assert any(step.TRAX in name for name in step.candidates(TINY))


def constant_model(logit: float) -> step.Model:
    """Predicts byte 0 with `logit`, and the rest evenly."""
    return step.Model(
        {"w": jnp.full((), logit)},
        lambda weights, tokens, rng: (
            jnp.zeros((*tokens.shape, step.VOCAB_SIZE)).at[..., 0].set(weights["w"])
        ),
    )


def test_every_step_starts_from_the_weights_of_the_last():
    runner = measured({"row": lambda: constant_model(0.5)}, repeats=3)["row"]
    # Adam moves a weight whose gradient keeps its sign by its learning rate, here in 2 + 3 steps.
    assert float(runner.state[0]["w"]) == pytest.approx(0.5 - 5 * 1e-4, abs=2e-5)


@pytest.mark.parametrize(
    "logit, reason", [(100.0, "first loss"), (math.nan, "the loss of step 1 is nan")]
)
def test_a_model_whose_loss_is_wrong_gets_no_time(logit, reason, capsys):
    rows = {"right": lambda: constant_model(0.0), "wrong": lambda: constant_model(logit)}
    results = measured(rows, repeats=1)
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    assert results["right"].seconds
    assert isinstance(results["wrong"], ArithmeticError)
    assert reason in cells(table, "wrong")[1]
    assert set(cells(table, "wrong")[2:]) == {"-"}


def test_a_peer_that_fails_is_a_row_and_no_error(monkeypatch, capsys):
    def fail():
        raise MemoryError("out of memory")

    rows = {OURS: lambda: constant_model(0.0), TRAX: fail}
    monkeypatch.setattr(step, "candidates", lambda shape, peers: rows)
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": rows[OURS]})
    step.main(["--tiny", "--repeats=1"])
    printed = capsys.readouterr().out
    assert cells(printed, TRAX)[1] == "MemoryError: out of memory"
    assert cells(printed, OURS)[-1] == "-"

    rows[OURS] = fail
    with pytest.raises(SystemExit, match=f"failed: {OURS}, Transformer"):
        step.main(["--tiny", "--repeats=1"])


def test_a_length_that_no_table_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--lengths", "7"])
    assert "--lengths" in capsys.readouterr().err


def test_models_compile_at_the_same_time(monkeypatch):
    """As many as `--threads` says: each waits here until as many others compile too."""
    barrier = threading.Barrier(3)
    compile_one = step.Runner.compile

    def compile_together(runner):
        barrier.wait(timeout=30)
        compile_one(runner)

    monkeypatch.setattr(step.Runner, "compile", compile_together)
    monkeypatch.setattr(step, "candidates", lambda shape, peers: dict.fromkeys((OURS, TRAX), guess))
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": guess})
    step.main(["--tiny", "--repeats=1", "--threads=3"])
    with pytest.raises(SystemExit):
        step.main(["--threads=0"])


def guess():
    return constant_model(0.0)


def test_calls_take_turns():
    order = []
    times = timing.in_turn({n: lambda n=n: order.append(n) for n in "ab"}, repeats=3)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"} and all(t >= 0 for t in times.values())


def test_generation_against_the_forward(monkeypatch, capsys):
    """Everything runs; the times are made up: 1 ms for the prompt, 3 for all, 9 for the forward."""

    def in_turn(functions, repeats):
        assert repeats == 1
        for function in functions.values():
            function()
        return {name: {"all": 0.009, 1: 0.001, 9: 0.003}[name] for name in functions}

    monkeypatch.delitem(generation.LSH, "strictly causal")
    monkeypatch.setattr(generation, "in_turn", in_turn)
    generation.main(["--tiny", "--repeats=1"])
    assert cells(capsys.readouterr().out, "ordinary")[1:] == ["9.0", "0.250", "36", "4000"]


def test_a_missing_peer_is_a_row(monkeypatch, capsys):
    def missing(*_):
        raise ImportError("no module | named torch")

    monkeypatch.setattr(generation_torch, "generator", missing)
    monkeypatch.setattr(generation, "ours", lambda *_: (0.002, 0.1))
    monkeypatch.setattr(generation, "reformer", lambda *_, **__: (None, None))
    shape = generation.SHAPES["tiny"]._replace(axial=True)
    generation.against_peers(shape, repeats=1, peers=True)
    printed = capsys.readouterr().out
    assert cells(printed, "reformax, ordinary")[1:] == ["1", "2.000", "500", "0.10"]
    name = "Hugging Face, float32, generate"
    assert cells(printed, name)[2] == "ImportError: no module / named torch"
    assert "batch 1: inf times their fastest" in printed


TINY_ATTENTION = attention.SHAPES["tiny"]
ATTENTION = attention.algorithms(TINY_ATTENTION)


def wrong_output(op):
    return op._replace(apply=lambda *args, **options: 1.001 * op.apply(*args, **options))


def wrong_gradient(op):
    def apply(params, q, *args, **options):
        return op.apply(params, q + 1e-3 * (q - jax.lax.stop_gradient(q)), *args, **options)

    return op._replace(apply=apply)


def wrong_plan(op):
    def plan(*args, **options):
        order = op.plan(*args, **options)
        return order._replace(queries=jnp.broadcast_to(jnp.arange(64), order.queries.shape))

    return op._replace(plan=plan)


def lost_positions(op):
    def plan(*args, **options):
        order = op.plan(*args, **options)
        return order._replace(queries=order.queries // 2 * 2)

    return op._replace(plan=plan)


def spoiled(spoil):
    """A row whose op `spoil` changes, and the op it is compared with not."""

    def make(impl, **options):
        op = lsh.lsh(**options, impl=impl)
        return op if impl == "xla" else spoil(op)

    return attention.Algorithm(make, ATTENTION["LSH, 1 hash"].options)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (wrong_output, "the output in float32 is"),
        (wrong_gradient, "the gradient in float32 is"),
        (wrong_plan, "of neighbours by their buckets"),
        (lost_positions, "the plan is no permutation"),
    ],
)
def test_attention_that_is_wrong_is_found(spoil, reason):
    with pytest.raises(ArithmeticError, match=reason):
        attention.check(spoiled(spoil), TINY_ATTENTION, "float32")


def test_attention_is_timed_where_it_is_right(monkeypatch, capsys):
    found = ATTENTION | {"wrong": spoiled(lost_positions)}
    monkeypatch.setattr(attention, "algorithms", lambda shape, xla: found)
    with pytest.raises(SystemExit, match="failed: wrong$"):
        attention.main(["--tiny", "--repeats=1", "--lengths", "64"])
    errors, times = capsys.readouterr().out.split("2 x 64 tokens")
    for name in ATTENTION:
        assert all(float(x) < 1e-5 for x in cells(errors, name)[1:3])
        assert float(cells(times, name)[1].split()[0]) > 0
        assert len(cells(times, name)) == len(cells(times, "attention"))
    assert cells(errors, "LSH, 1 hash")[3] == "100.0%"
    assert cells(times, "dense")[-1] == "1.00 (1.00)"
    assert cells(times, "wrong")[1] == "ArithmeticError: the plan is no permutation"
    assert set(cells(times, "wrong")[2:]) == {"-"}


def test_a_key_of_several_rounds_counts_as_often_in_the_oracle():
    row = ATTENTION["LSH, 1 hash"]
    row = row._replace(options=row.options | dict(n_hashes=2, count_once=False))
    assert attention.check(row, TINY_ATTENTION, "float32").output < 1e-5
    once = row._replace(options=row.options | dict(count_once=True))
    mixed = once._replace(make=lambda **o: lsh.lsh(**o | dict(count_once=False)))
    with pytest.raises(ArithmeticError, match="the output"):
        attention.check(mixed, TINY_ATTENTION, "float32")


def test_kernels_are_held_to_array_operations_and_rows_of_those_to_the_oracle(monkeypatch):
    def unasked(*args):
        raise AssertionError("the oracle was asked")

    monkeypatch.setattr(attention, "oracle", unasked)
    row = ATTENTION["local"]._replace(impl="pallas_interpret")
    shape = TINY_ATTENTION._replace(check_length=20, n_heads=1)
    assert attention.check(row, shape, "float32").gradient < 1e-5
    with pytest.raises(AssertionError):
        attention.check(ATTENTION["local"], shape, "float32")


def test_a_row_that_does_not_compile_is_its_reason():
    def fail(*inputs):
        raise MemoryError("out of memory")

    arrays = TINY_ATTENTION.inputs(2, 64, "float32")
    found = {"dense": rows.dense(), "wrong": rows.Row(fail)}
    with ThreadPoolExecutor(1) as pool:
        time = functools.partial(timing.time_calls, wait=jax.block_until_ready, repeats=1)
        results = dict(rows.measure_rows(found, arrays, time, pool))
    assert isinstance(results["dense"], rows.Result)
    assert isinstance(results["wrong"], MemoryError)


def test_peers_in_torch_fail_as_rows(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no | GPU")

    monkeypatch.setattr(attention_torch, "rows", lambda: {"peer": (fail, {})})
    (row,) = attention_torch.answer({}, repeats=1)
    assert row == {"name": "peer", "error": "RuntimeError: no / GPU"}
    known = rows.peer_result(json.loads(json.dumps(row)))
    assert isinstance(known, PeerError) and rows.cells(known, None) == [row["error"]]


def test_a_process_of_peers_that_ends_is_an_error_and_the_next_request_has_another():
    peers = processes.Peers("no_module")
    peers.command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    for _ in range(2):
        assert list(peers.ask(n=1)) == [{"error": "RuntimeError: ended with status 3"}]
    peers.command = [sys.executable, "-c", 'input(); print(\'{"name": "x"}\\n{}\')']
    assert list(peers.ask(n=1)) == [{"name": "x"}]
    peers.close()


def test_a_reason_fits_a_cell():
    text = reason(ValueError("a | b\n" + 200 * "x" + " the end"))
    assert text.startswith("ValueError: a / b x") and text.endswith("the end") and len(text) < 161


def test_lengths_that_do_not_divide_the_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--tiny", "--lengths", "48"])
    assert "--lengths has [48]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attention.main(["--exact", "--xla"])


class WrongBlocks(block_sparse.Masked):
    def attend(self, shape):
        return lambda *args: 1.001 * super(WrongBlocks, self).attend(shape)(*args)


def test_block_sparse_attention_is_timed_where_it_is_right(monkeypatch, capsys):
    found = block_sparse.candidates(block_sparse.SHAPES["tiny"])
    found = {name: found[name] for name in ("butterfly, causal", "all")}
    found["wrong"] = WrongBlocks(*found["all"])
    monkeypatch.setattr(block_sparse, "candidates", lambda shape: found)
    with pytest.raises(SystemExit, match="failed: wrong$"):
        block_sparse.main(["--tiny", "--repeats=1"])
    errors, times = capsys.readouterr().out.split("| attention | blocks")
    assert all(float(x) < 1e-5 for x in cells(errors, "butterfly, causal")[1:3])
    assert cells(times, "butterfly, causal")[1:3] == ["8", "50.00%"]
    assert all(float(x.split()[0]) > 0 for x in cells(times, "all")[3:5])
    assert cells(times, "wrong")[3].startswith("ArithmeticError: the output in float32")


def test_a_line_through_times_and_the_kernels_of_a_trace():
    assert block_sparse.off_the_line([1, 5, 9], [3.0, 11.0, 19.0]) == pytest.approx((1, 2, 0))
    assert block_sparse.off_the_line([1, 5, 9], [3.0, 11.0, 39.0])[2] > 0.1

    def event(thread, ms, **more):
        return dict(ph="X", pid=1, tid=thread, dur=ms * 1e3) | more

    def thread(number, name):
        return event(number, 0, ph="M", name="thread_name", args=dict(name=name))

    threads = [thread(1, "Stream #13(Compute)"), thread(2, "python")]
    trace = dict(traceEvents=[*threads, event(1, 2.5), event(2, 9.0), event(1, 0.5)])
    assert block_sparse.kernel_ms(trace) == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["plain", "printed"])
def test_the_peers_of_exact_attention_compute_attention(name, monkeypatch):
    monkeypatch.setattr(rabe_staats, "QUERY_CHUNK_SIZE", 8)
    monkeypatch.setattr(rabe_staats, "KEY_CHUNK_SIZE", 16)
    q, k, v, d = TINY_ATTENTION.inputs(2, 64, "float32")
    want, got = (
        jax.jit(rows.output_and_gradient(attend))(d, q, k, v)
        for attend in (lambda *x: dense.dense()(*x, causal=True), getattr(rabe_staats, name))
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rows.relative_error(x, y) < 1e-5


def test_memory_by_length_is_a_table(capsys):
    exact_attention.main(["--tiny", "--memory", "--threads=1"])
    table = capsys.readouterr().out
    names = cells(table, "N")
    row = dict(zip(names, cells(table, "1,024"), strict=True))
    assert cells(table, "256")[-1] == "44 MB" and row["Rabe and Staats, table 3"] == "8.0 MB"
    assert float(row["plain"]) > float(row["flash"]) > 0


def test_the_longest_gradient_is_checked(capsys):
    exact_attention.main(["--tiny", "--longest"])
    printed = capsys.readouterr().out
    for name in exact_attention.attentions():
        assert max(float(x) for x in cells(printed, name)[-2:]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_fn, steps, names",
    [(TransformerLM, 20, list(exact_attention.in_parts(32))), (ReformerLM, 4, ["flash"])],
)
def test_models_with_exact_attention_have_the_losses_of_dense_attention(model_fn, steps, names):
    sizes = dict(steps=steps, length=32, d_model=16, n_layers=1)
    train = functools.partial(exact_attention.loss_curve, **sizes, model_fn=model_fn)
    want = train(dense.dense())
    assert want[-1] < want[0] - 0.05
    for name in names:
        op = exact_attention.in_parts(32)[name]
        difference = train(op) - want
        assert np.abs(difference).max() < 1e-3, name
