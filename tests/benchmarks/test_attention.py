"""Attentions next to each other: checks, times, and processes of peers."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention, step
from benchmarks.harness import calls, rows, side_by_side
from benchmarks.peers import names, triton_tuning
from benchmarks.rows import attention as attention_rows
from tests.helpers import changed


def test_a_length_that_no_table_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--tiny", "--lengths", "7"])
    assert "--lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--limit=0"], "argument --limit: 0: expected more than 0 seconds"),
        (["--limit=nan"], "argument --limit: nan: expected more than 0 seconds"),
        (["--table=t", "--tokens=64"], "--tokens is 64: it goes without --table, leave one out"),
        (["--table=t", "--repeats=7"], "--repeats is 7: it goes without --table, leave one out"),
        (["--settings", "plain"], "--settings is plain: it goes with --table"),
        (["--table=t", "--unchecked"], "--unchecked is True: it goes without --table"),
        (["--table=t", "--peers=python3"], "--peers is python3: it goes without --table"),
    ],
)
def test_flags_that_the_suite_of_attention_cannot_read_are_refused(flags, line, capsys):
    with pytest.raises(SystemExit):
        attention.main(["--tiny", *flags])
    assert line in capsys.readouterr().err


TINY_ATTENTION = attention.SHAPES["tiny"]


LSH = attention_rows.row("lsh, 1 hash", TINY_ATTENTION)


def wrong_output(op):
    return changed(op, _apply=lambda self, *args: 1.001 * op._apply(*args))


def wrong_gradient(op):
    def apply(self, call, params, q, *args):
        return op._apply(call, params, q + 1e-3 * (q - jax.lax.stop_gradient(q)), *args)

    return changed(op, _apply=apply)


def wrong_plan(op):
    def plan(self, call, *args):
        return op._plan(call.but(rng=jax.random.fold_in(call.rng, 1)), *args)

    return changed(op, _plan=plan)


def lost_positions(op):
    def plan(self, *args):
        order = op._plan(*args)
        return order._replace(query_positions=order.query_positions // 2 * 2)

    return changed(op, _plan=plan)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (wrong_output, "the output in float32 is"),
        (wrong_gradient, "the gradient in float32 is"),
        (wrong_plan, "the plan has"),
        (lost_positions, "the plan is no permutation"),
    ],
)
def test_attention_that_is_wrong_is_found(spoil, reason):
    with pytest.raises(ArithmeticError, match=reason):
        attention_rows.check(LSH, TINY_ATTENTION, spoil)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lsh, 1 hash", "local", "memory_efficient", "linear"])
def test_attentions_pass_their_checks(name, dtype):
    shape = TINY_ATTENTION._replace(dtype=dtype)
    errors = attention_rows.check(attention_rows.row(name, shape), shape)
    assert 0 < max(errors) < attention_rows.TOLERANCE[dtype]


def asked_of_a_row(name, folder, **options):
    """What the process of a row answers, without its stages."""
    shape = TINY_ATTENTION._asdict() | dict(lengths=[64])
    given = dict(lengths=[64], known={}, known_errors=None, repeats=1) | options
    answers = attention_rows.by_length(name, shape, folder=str(folder), limit=9.0, **given)
    return [x for x in answers if "stage" not in x]


@pytest.mark.slow
def test_attention_is_timed_where_it_is_right(tmp_path, monkeypatch):
    (answer,) = asked_of_a_row("lsh, packed", tmp_path)
    assert max(answer["errors"]) < 1e-5 and answer["gradient"].ms > 0
    check = attention_rows.check
    monkeypatch.setattr(attention_rows, "check", lambda *given: check(*given, wrong_output))
    (answer,) = asked_of_a_row("lsh, packed", tmp_path)
    assert answer["error"].startswith("ArithmeticError: the output in float32")


def test_a_row_that_does_not_compile_is_its_reason(tmp_path, monkeypatch):
    def fail(*inputs):
        raise MemoryError("out of memory")

    monkeypatch.setattr(attention_rows, "compile_row", fail)
    (answer,) = asked_of_a_row("flash", tmp_path, known_errors=[])
    assert answer == {"name": "flash", "length": 64, "error": "MemoryError: out of memory"}


def test_rows_stand_in_their_groups_with_what_they_are_compared_with():
    groups = attention_rows.algorithms(TINY_ATTENTION)
    found = attention.chosen(["nsa", "blocks"], groups)
    assert list(found) == ["flash", "flash, 1 head of keys", "nsa", *groups["blocks"]]
    assert {known.of for known in names.PEERS.values()} <= attention.chosen(groups, groups).keys()
    for name in sum(map(list, groups.values()), []):
        alone = attention.chosen([name], groups)
        assert alone.keys() >= {made.dense for made in alone.values()}
    with pytest.raises(ValueError, match="--only has no: expected some of exact, hashed, "):
        attention.chosen(["no", "lsh"], groups)


@pytest.mark.parametrize("name", ["gated_linear", "gated_delta", "kda"])
def test_a_recurrence_of_jax_linear_attention_gets_our_inputs(name, monkeypatch):
    """A token by token recurrence stands in the place of the package."""

    def linear_attention(kind, q, k, v, g, beta=None, use_qk_l2norm=False):
        assert use_qk_l2norm == (beta is not None)
        if use_qk_l2norm:
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        decay = jnp.exp(g if g.ndim == 4 else g[..., None])
        beta = jnp.ones(g.shape[:3]) if beta is None else beta
        state, rows = jnp.zeros((*v[:, 0].shape, q.shape[3])), []
        for t in range(q.shape[1]):
            state = state * decay[:, t, :, None]
            old = jnp.einsum("bnvh,bnh->bnv", state, k[:, t]) if use_qk_l2norm else 0
            written = beta[:, t, :, None] * (v[:, t] - old)
            state = state + written[..., None] * k[:, t, :, None]
            rows.append(jnp.einsum("bnvh,bnh->bnv", state, q[:, t]) / q.shape[3] ** 0.5)
        return jnp.stack(rows, axis=1), state

    package = types.ModuleType("jla.ops")
    package.linear_attention = linear_attention
    monkeypatch.setitem(sys.modules, "jla", types.ModuleType("jla"))
    monkeypatch.setitem(sys.modules, "jla.ops", package)
    monkeypatch.setattr(attention_rows.jax_linear_attention, "is_installed", lambda: True)
    shape = TINY_ATTENTION._replace(check_length=16)
    errors = attention_rows.check(attention_rows.row(f"jax-linear-attention, {name}", shape), shape)
    assert 0 < max(errors) < 1e-5


def test_a_kept_figure_is_read_as_it_was():
    times = calls.Times(2.0, 1.0)
    line = rows.record("linear", None, 64, TINY_ATTENTION, rows.Result(times, times, None))
    assert rows.recorded(line) == rows.Result(times, times, None)
    assert line["shape"] == "2 heads of 8, float32"
    several = rows.about(TINY_ATTENTION._replace(tokens=128))
    assert several["shape"] == "2 heads of 8, float32, 128 tokens a call"


# An interpreter of peers, of which `hangs` hangs where `where` says, and `other` does not.
PEERS = """#!{python}
import fcntl, json, os, sys, time
_, _, _, function, request = sys.argv
request = json.loads(request)
def tell(**line):
    print(json.dumps(line), flush=True)
def work(name, where):
    tell(stage=f"{{where}} {{name}}", limit=request["limit"])
    time.sleep(60 if (name, where) == ("hangs", "{where}") else 0)
if function == "peers.attention_torch.compile_and_check":
    work(request["name"], "compile")
    tell(name=request["name"], errors=[])
else:
    tell(stage="wait", limit=None)
    fcntl.flock(lock := open(request["folder"] + "/lock", "w"), fcntl.LOCK_EX)
    for name, lengths in request["lengths"].items():
        if os.path.exists(request["folder"] + f"/{{name}}.failed"):
            continue
        for length in lengths:
            work(name, "time")
            times = dict(forward=[1, 2], gradient=[3, 4], temp_mib=None, errors=[])
            tell(name=name, of="linear", length=length, **times)
"""


@pytest.mark.parametrize("where", ["compile", "time"])
def test_a_peer_that_hangs_is_killed_and_the_next_one_asked(where, tmp_path, monkeypatch, capsys):
    """What a file has is not measured again."""
    python, saved = tmp_path / "python", tmp_path / "a.jsonl"
    python.write_text(PEERS.format(python=sys.executable, where=where))
    python.chmod(0o755)
    peers = {"hangs": names.Known("linear", 2), "other": names.Known("linear")}
    monkeypatch.setattr(attention, "PEERS", peers)
    for process in ("numbers", "ours"):
        monkeypatch.setattr(attention.Run, process, lambda *given: iter(()))
    monkeypatch.setattr(attention, "exit_if", list)
    flags = ["--tiny", "--only=linear", f"--peers={python}", f"--saved={saved}", "--limit=0.5"]
    attention.main(flags)
    seconds = "0.5"
    printed = capsys.readouterr()
    late = f"hangs, 128: TimeoutError: more than {seconds} s: {where} hangs\n"
    assert late in printed.out and f" s] {where} other" in printed.err
    for line in "other, 128: 1.000 (2.000) | ", "| other | 1.000 (2.000) | 3.000 (4.000) |":
        assert line in printed.out
    saved.open("a").write('{"machine": "cut o')
    attention.main(flags)
    printed = capsys.readouterr()
    assert "s] " not in printed.err and "| other | 1.000 (2.000) | 3.000 (4.000) |" in printed.out


@pytest.mark.parametrize("index, made", [(0, [0, 3]), (1, [1, 4, 0]), (2, [2, 0])])
def test_processes_share_the_versions_of_a_kernel(index, made, monkeypatch):
    """All are compiled by one of three, the first by each, and none is timed."""

    class Autotuner:
        def prune_configs(self, kwargs):
            return list(range(5))

        def _bench(self, *args, config):
            return self.do_bench(lambda: compiled.append(config), quantiles=(0.5, 0.2, 0.8))

    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", types.ModuleType("triton.runtime"))
    autotuner = types.SimpleNamespace(Autotuner=Autotuner)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", autotuner)
    triton_tuning.compile_share(index, 3)
    kernel, compiled = Autotuner(), []
    assert [kernel._bench(config=x) for x in kernel.prune_configs({})] == [[0.0] * 3] * len(made)
    assert compiled == made


def test_a_row_that_fails_costs_itself_alone(tmp_path, monkeypatch, capsys):
    """Its reason is in the file for all lengths."""

    def ask_each(asked, at_once):
        assert list(asked) == [("ours", n) for n in ("flash", "linear", "retention")]
        yield ("ours", "linear"), {"error": "RuntimeError: no"}
        times = dict(forward=[1, 2], gradient=[3, 4], temp_mib=5.0, errors=[0.0, 0.0])
        for length in (64, 128):
            yield ("ours", "retention"), {"name": "retention", "length": length} | times

    monkeypatch.setattr(side_by_side, "ask_each", ask_each)
    saved = tmp_path / "a.jsonl"
    with pytest.raises(SystemExit, match="failed: flash, linear$"):
        attention.main(["--tiny", "--only", "linear", "retention", f"--saved={saved}"])
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [x["attention"] for x in lines] == ["linear"] * 2 + ["retention"] * 2
    printed = capsys.readouterr().out
    assert "| retention | 1.000 (2.000) | 3.000 (4.000) | 5 | - | - |" in printed
    assert "| linear | RuntimeError: no |" in printed
