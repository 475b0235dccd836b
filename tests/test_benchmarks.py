"""The benchmarks of a step, of attention and of generation, on shapes that take no time."""

import functools
import json
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    attention_torch,
    block_sparse,
    exact_attention,
    generation,
    measuring,
    rabe_staats,
    step,
    translation,
)
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dense, lsh

TINY = step.Shape(
    batch=2,
    length=32,
    d_model=16,
    d_ff=32,
    n_heads=2,
    d_head=8,
    n_layers=2,
    local_chunk_len=8,
    lsh_chunk_len=8,
    trax_lsh_chunk_len=8,
)
OURS, TRAX = step.REFORMER, f"{step.TRAX}, n_parallel_heads=1"


def measured(rows, repeats):
    return step.measure(step.prepare(rows, TINY, threads=2), repeats)


@pytest.fixture(scope="module")
def results():
    rows = step.candidates(TINY)
    return measured({name: rows[name] for name in (OURS, TRAX)}, repeats=2)


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_both_train_and_are_of_one_size(results):
    ours, trax = results[OURS], results[TRAX]
    assert len(ours.seconds) == len(trax.seconds) == 2
    assert ours.n_weights == trax.n_weights


def test_the_table_compares_with_trax_where_it_ran(results):
    table = step.table(results, TINY)
    assert cells(table, "model")[-1] == "speed / Trax's, n_parallel_heads=1"
    ratio = results[TRAX].median / results[OURS].median
    assert cells(table, OURS)[-1] == f"{ratio:.2f}"
    assert cells(table, TRAX)[-1] == "1.00"
    alone = step.table({OURS: results[OURS]}, TINY)
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
def test_a_model_whose_loss_is_wrong_gets_no_time(logit, reason):
    rows = {"right": lambda: constant_model(0.0), "wrong": lambda: constant_model(logit)}
    results = measured(rows, repeats=1)
    table = step.table(results, TINY)
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
    monkeypatch.setitem(step.SHAPES, "cpu", (TINY,))
    monkeypatch.setattr(step.jax, "default_backend", lambda: "cpu")
    step.main(["--repeats=1"])
    printed = capsys.readouterr().out
    assert cells(printed, TRAX)[1] == "MemoryError: out of memory"
    assert cells(printed, OURS)[-1] == "-"

    rows[OURS] = fail
    with pytest.raises(SystemExit, match=f"failed: {OURS}, Transformer"):
        step.main(["--repeats=1"])


def test_a_length_that_no_table_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--lengths", "7"])
    assert "--lengths" in capsys.readouterr().err


def test_models_compile_beside_each_other(monkeypatch):
    """As many as `--threads` says: each waits here until as many others compile too."""
    barrier = threading.Barrier(3)
    compile_one = step.Runner.compile

    def compile_together(runner):
        barrier.wait(timeout=30)
        compile_one(runner)

    monkeypatch.setattr(step.Runner, "compile", compile_together)
    monkeypatch.setattr(step, "candidates", lambda shape, peers: dict.fromkeys((OURS, TRAX), guess))
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": guess})
    monkeypatch.setitem(step.SHAPES, "cpu", (TINY,))
    monkeypatch.setattr(step.jax, "default_backend", lambda: "cpu")
    step.main(["--repeats=1", "--threads=3"])
    with pytest.raises(SystemExit):
        step.main(["--threads=0"])


def guess():
    return constant_model(0.0)


TINY_TEXT = generation.Shape(
    context=40, n_new=9, d_model=8, d_ff=8, n_heads=2, d_head=4, n_layers=1, cycle=("lsh",)
)


def test_generation_beside_the_forward(monkeypatch, capsys):
    """Everything runs; the times are made up: 1 ms for the prompt, 3 for all, 9 for the forward."""

    def in_turn(functions, repeats):
        assert repeats == 1
        made_up = {"all": 0.009, 1: 0.001, TINY_TEXT.n_new: 0.003}
        for function in functions.values():
            function()
        return {name: made_up.get(name, 0.129) for name in functions}

    monkeypatch.delitem(generation.LSH, "strictly causal")
    monkeypatch.setattr(generation, "in_turn", in_turn)
    generation.on_cpu(TINY_TEXT._replace(context=300), repeats=1)
    printed = capsys.readouterr().out
    assert cells(printed, "ordinary")[1:] == ["9.0", "0.250", "36", "4000"]
    assert cells(printed, "128")[1:] == ["128.0", "1000"]


def test_calls_take_turns():
    order = []
    times = generation.in_turn({n: lambda n=n: order.append(n) for n in "ab"}, repeats=3)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"} and all(t >= 0 for t in times.values())


def test_a_missing_peer_is_a_row(monkeypatch, capsys):
    def missing(*_):
        raise ImportError("no module | named torch")

    monkeypatch.setattr(generation, "theirs", missing)
    monkeypatch.setattr(generation, "ours", lambda *_: (0.002, 0.1))
    generation.on_gpu(
        TINY_TEXT._replace(axial_shape=(8, 8)), repeats=1, peers=True, peer_new=4, peer_seconds=60
    )
    printed = capsys.readouterr().out
    assert cells(printed, "reformax, ordinary")[1:] == ["1", "2.000", "500", "0.10"]
    name = "Hugging Face, float32, generate"
    assert cells(printed, name)[2] == "ImportError: no module / named torch"
    assert "batch 1: inf times their fastest" in printed


TINY_ATTENTION = attention.Shape(
    tokens=128,
    lengths=(64, 128),
    n_heads=2,
    d_head=8,
    chunk_len=16,
    dtype="float32",
    check_length=60,
    check_dtypes=("float32",),
)
ATTENTION = {
    name: row
    for name, row in attention.rows(TINY_ATTENTION.chunk_len).items()
    if name in ("LSH, 1 hash", "local")
}


@pytest.fixture
def tiny_attention(monkeypatch):
    """`benchmarks.attention` with two rows, which a test may change."""
    rows = dict(ATTENTION)
    monkeypatch.setattr(attention, "rows", lambda chunk_len, xla: rows)
    monkeypatch.setattr(measuring, "N_QUEUED", 2)
    monkeypatch.setitem(attention.SHAPES, "cpu", TINY_ATTENTION)
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "cpu")
    return rows


def wrong_output(op):
    return op._replace(apply=lambda *args, **options: 1.001 * op.apply(*args, **options))


def wrong_gradient(op):
    def apply(params, q, *args, **options):
        return op.apply(params, q + 1e-3 * (q - jax.lax.stop_gradient(q)), *args, **options)

    return op._replace(apply=apply)


def wrong_plan(op):
    def plan(*args, **options):
        order = op.plan(*args, **options)
        return order._replace(order=jnp.broadcast_to(jnp.arange(64), order.order.shape))

    return op._replace(plan=plan)


def lost_positions(op):
    def plan(*args, **options):
        order = op.plan(*args, **options)
        return order._replace(order=order.order // 2 * 2)

    return op._replace(plan=plan)


def spoiled(spoil):
    """A row whose op `spoil` changes, and the op it is compared with not."""

    def make(impl, **options):
        op = lsh.lsh(**options, impl=impl)
        return op if impl == "xla" else spoil(op)

    return attention.Row(make, ATTENTION["LSH, 1 hash"].options)


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


def test_attention_is_timed_and_drawn_where_it_is_right(tiny_attention, capsys, tmp_path):
    path = tmp_path / "attention.png"
    tiny_attention["wrong"] = spoiled(lost_positions)
    with pytest.raises(SystemExit, match="failed: wrong$"):
        attention.main(["--repeats=1", "--lengths", "64", f"--plot={path}"])
    printed = capsys.readouterr().out
    assert path.stat().st_size > 0
    errors, times, crossovers = (
        printed[printed.index(mark) :].partition("\n\n")[2].partition("\n\n")[0]
        for mark in ("Largest errors", "2 x 64 tokens", "Faster than")
    )
    for name in ATTENTION:
        assert all(float(x) < 1e-5 for x in cells(errors, name)[1:3])
        assert float(cells(times, name)[1].split()[0]) > 0
        assert len(cells(times, name)) == len(cells(times, "attention"))
        assert cells(crossovers, name)[1] in ("64", "-")
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
    def fail(**options):
        raise MemoryError("out of memory")

    rows = {"dense": attention.dense_call, "wrong": attention.Row(fail, {})}
    with ThreadPoolExecutor(1) as pool:
        results = dict(attention.measure(rows, TINY_ATTENTION, 64, 1, pool))
    assert isinstance(results["dense"], attention.Result)
    assert isinstance(results["wrong"], MemoryError)


def test_peers_in_torch_fail_as_rows(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no | GPU")

    monkeypatch.setattr(attention_torch, "rows", lambda: {"peer": (fail, {})})
    (row,) = attention_torch.answer({}, repeats=1)
    assert row == {"name": "peer", "error": "RuntimeError: no / GPU"}
    known = attention._peer_result(json.loads(json.dumps(row)))
    assert cells(attention.time_line("peer", known, None), "peer")[1] == row["error"]


def test_a_process_of_peers_that_ends_is_a_row_and_the_next_length_has_another():
    peers = attention.Peers(sys.executable)
    peers._command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    for _ in range(2):
        ((_, error),) = peers.measure(TINY_ATTENTION, 64, 1)
        assert str(error) == "ended with status 3"
    peers._command = [sys.executable, "-c", 'input(); print(\'{"name": "x", "error": "y"}\\n{}\')']
    ((name, error),) = peers.measure(TINY_ATTENTION, 64, 1)
    assert (name, str(error)) == ("x", "y")
    peers.close()


def test_the_crossover_is_where_a_row_stays_faster():
    def known(*milliseconds):
        return [attention.Result(*[attention.Times(ms, ms)] * 2, 0.0) for ms in milliseconds]

    lengths = (1, 2, 4, 8)
    table = dict(a=known(1, 3, 1, 1), b=known(2, 2, 2, 3), dense=known(2, 2, 2, 2))
    results = {n: {name: row[i] for name, row in table.items()} for i, n in enumerate(lengths)}
    assert attention.crossover(results, "a", "forward") == 4
    assert attention.crossover(results, "b", "gradient") is None
    results[4]["a"] = MemoryError()
    assert attention.crossover(results, "a", "forward") == 8


def test_lengths_that_do_not_divide_the_tokens_are_refused(tiny_attention, capsys):
    with pytest.raises(SystemExit):
        attention.main(["--lengths", "48"])
    assert "--lengths has [48]" in capsys.readouterr().err


TINY_BLOCKS = block_sparse.SHAPES["cpu"]._replace(
    length=64, n_heads=1, d_head=4, block_size=16, check_length=40
)


class WrongBlocks(block_sparse.Row):
    def op(self, shape):
        return wrong_output(super().op(shape))


def test_block_sparse_attention_is_timed_and_drawn_where_it_is_right(monkeypatch, capsys, tmp_path):
    found = block_sparse.rows(TINY_BLOCKS)
    found = {name: found[name] for name in ("butterfly, causal", "all")}
    found["wrong"] = WrongBlocks(*found["all"])
    monkeypatch.setattr(block_sparse, "rows", lambda shape: found)
    monkeypatch.setattr(measuring, "N_QUEUED", 2)
    monkeypatch.setitem(block_sparse.SHAPES, "cpu", TINY_BLOCKS)
    path = tmp_path / "blocks.png"
    with pytest.raises(SystemExit, match="failed: wrong$"):
        block_sparse.main(["--repeats=1", f"--plot={path}"])
    errors, times = capsys.readouterr().out.split("Dense, causal")
    assert path.stat().st_size > 0
    assert all(float(x) < 1e-5 for x in cells(errors, "butterfly, causal")[1:])
    assert cells(times, "butterfly, causal")[1:3] == ["8", "50.00%"]
    assert all(float(x) > 0 for x in cells(times, "all")[3:5])
    assert cells(times, "wrong")[3].startswith("ArithmeticError: output and gradient in float32")


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


def test_exact_attention_is_checked_and_timed_beside_the_papers_code(tiny_attention, capsys):
    attention.main(["--exact", "--repeats=1", "--lengths", "64"])
    printed = capsys.readouterr().out
    assert float(cells(printed, attention.PRINTED)[1].split()[0]) > 0
    assert len(cells(printed, "flash, 64")) == 3
    assert all(x != "-" for x in cells(printed, "memory_efficient, 64"))
    with pytest.raises(SystemExit):
        attention.main(["--exact", "--xla"])


@pytest.mark.parametrize("name", ["plain", "printed"])
def test_the_peers_of_exact_attention_compute_attention(name, monkeypatch):
    monkeypatch.setattr(rabe_staats, "QUERY_CHUNK_SIZE", 8)
    monkeypatch.setattr(rabe_staats, "KEY_CHUNK_SIZE", 16)
    q, k, v, d = attention.inputs(TINY_ATTENTION, 2, 64, "float32")
    want, got = (
        jax.jit(attention.output_and_gradient(attend))(d, q, k, v)
        for attend in (lambda *x: dense.dense()(*x, causal=True), getattr(rabe_staats, name))
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert attention.relative_error(x, y) < 1e-5


def test_memory_by_length_is_a_table(capsys):
    exact_attention.main(["--memory", "--lengths", "64", "256", "--threads=1"])
    forward, gradient = capsys.readouterr().out.split("gradient\n")
    assert len(cells(forward, "64")) == len(cells(forward, "N"))
    assert cells(forward, "256")[-1] == "270 KB" and cells(gradient, "256")[-1] == "44 MB"
    assert float(cells(gradient, "256")[2]) > float(cells(gradient, "256")[-3]) > 0


def test_the_longest_gradient_is_checked(capsys):
    exact_attention.main(["--longest", "--length=100"])
    printed = capsys.readouterr().out
    for name in exact_attention.attentions():
        assert max(float(x) for x in cells(printed, name)[-2:]) < 1e-5


@pytest.mark.parametrize(
    "model_fn, steps, names",
    [(TransformerLM, 20, list(exact_attention.in_parts(32))), (ReformerLM, 4, ["flash"])],
)
def test_models_with_exact_attention_have_the_losses_of_dense_attention(model_fn, steps, names):
    sizes = dict(steps=steps, length=32, d_model=16, n_layers=1)
    train = functools.partial(exact_attention.loss_curve, **sizes, model_fn=model_fn, jit=jax.jit)
    want = train(dense.dense())
    assert want[-1] < want[0] - 0.05
    for name in names:
        op = exact_attention.in_parts(32)[name]
        difference = train(op) - want
        assert np.abs(difference).max() < 1e-3, name


@pytest.mark.parametrize("flags", [[], ["--step", "--batch=2", "--length=32"]])
def test_translation_beside_peers_that_are_missing(flags, tmp_path, monkeypatch, capsys):
    """Whatever PyTorch's process answers, the rows of reformax are there."""
    (tmp_path / "lines.txt").write_text("one\n\ntwo words and more\nthree words here\n" * 4)
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = dict(vocab_size=50, n_heads=2)
    monkeypatch.setattr(translation, "SIZES", translation.SIZES | sizes)
    small = ["--d_model=8", "--n_layers=1", "--repeats=1", "--batch_tokens=64"]
    translation.main([f"--sources={tmp_path / 'lines.txt'}", *small, *flags])
    out = capsys.readouterr().out
    if flags:
        for layers in ("written out", "in a loop"):
            ours = cells(out, f"reformax, layers {layers}")
            assert abs(float(ours[1]) - math.log(50)) < 1 and float(ours[2]) > 0
        assert "ImportError: none here" in cells(out, "PyTorch, masks")[1]
    else:
        assert "12 sentences of 5.0 tokens in 3 batches" in out
        for n_beams in ("1", "4"):
            row = cells(out, n_beams)
            assert float(row[2]) > 0 and "ImportError: none here" in row[3]
