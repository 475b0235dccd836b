"""A trace of steps: three of them, once the first are done, and never at a run's cost."""

import jax
import pytest

from reformax.cli import train
from reformax.training import loop, profile
from tests.training import worker

TINY = ("d_model=16", "d_ff=16", "d_head=8", "n_heads=2", "n_layers=2", "length=64")
TINY += ("batch_size=2", "warmup_steps=1", "stdlib.stdlib.max_bytes=20_000")
TINY += ("loop.train.eval_whole=False", "loop.train.sample_prompts=[]")


@pytest.fixture
def calls(monkeypatch):
    """The calls of JAX's profiler."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


@pytest.mark.slow
def test_the_flag_writes_a_trace_into_the_folder(tmp_path, call):
    flags = [f"--config={x}" for x in (*TINY, "steps=10")]
    code, out, err = call(train.main, f"--output_dir={tmp_path}", "--profile", *flags)
    assert code == 0, err
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))
    assert "tensorboard/ profile/\n" in out


@pytest.mark.parametrize("steps, n_calls", [(6, 2), (4, 0)])
def test_three_steps_are_traced_after_five(steps, n_calls, calls, tmp_path, capsys):
    seen = []
    record = profile.Callback(on_step=lambda step, values: seen.append((step, len(calls))))
    traced = [profile.profile(tmp_path / "trace"), record]
    loop.train(tmp_path / "run", **worker.arguments(steps=steps), callbacks=traced)
    assert calls == [str(tmp_path / "trace"), "stop"][:n_calls]
    assert [step for step, n in seen if n == 1] == list(range(5, min(steps + 1, 8)))
    assert ("note: no trace: it begins after 5 steps" in capsys.readouterr().err) == (steps == 4)


def test_a_trace_that_fails_is_told_and_the_run_goes_on(calls, tmp_path, monkeypatch, capsys):
    def fails(folder):
        raise OSError("no space")

    monkeypatch.setattr(jax.profiler, "start_trace", fails)
    arguments = worker.arguments(steps=12) | {"callbacks": [profile.profile(tmp_path)]}
    assert loop.train(tmp_path / "run", **arguments)["step"] == 12
    assert "the trace failed, and the work goes on (OSError: no space)" in capsys.readouterr().err
    assert not calls
