"""A checkpoint comes back as it was saved, or one line says what is wrong with it."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.training import array_reader, arrays, checkpoint, description, manifest
from reformax.training.averaging import last_configs, restore_mean
from reformax.training.step import TrainState
from tests.helpers import assert_trees_equal


def state(step=3, d=4, ema=False, momentum=True):
    params = {
        "w": jnp.arange(2.0 * d).reshape(2, d) + step,
        "half": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
    }
    opt_state = (jnp.int32(step), {"mu": params["w"] * 2} if momentum else ())
    average = jax.tree.map(lambda x: x + 1, params) if ema else None
    return TrainState(jnp.int32(step), params, opt_state, average)


def saved(folder, steps=(3,), scores=None, keep=2, **options):
    checkpoints = checkpoint.Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state(step, **options), (scores or {}).get(step))
    checkpoints.wait()
    return checkpoints


def save_arrays(folder, tensors):
    saving = arrays.Saving(folder, tensors)
    saving.finish()
    saving.merge()


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_state_comes_back_bit_for_bit(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    before = state(ema=True)
    checkpoints.save(3, before, 1.25, "steps = 3\n", window=[[0.1, 0.2]])
    checkpoints.wait()
    assert checkpoints.config(3) == "steps = 3\n"
    after, info = checkpoint.Checkpoints(tmp_path).restore(3, jax.eval_shape(lambda: before))
    assert info == {"step": 3, "score": 1.25, "window": [[0.1, 0.2]]}
    assert_trees_equal(after, before)


def test_it_says_what_wrote_it_and_what_it_holds(tmp_path):
    saved(tmp_path)
    described = json.loads((tmp_path / "checkpoints/3/checkpoint.json").read_text())
    assert described["format"] == description.FORMAT and described["step"] == 3
    assert described["tensors"]["params.w"] == [[2, 4], "float32"]
    assert described["packages"]["jax"] == jax.__version__


def test_what_happens_after_save_does_not_change_it(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    array, window, changed = jnp.arange(1000.0), [1, 2], threading.Event()
    write = checkpoint.Checkpoints._write
    monkeypatch.setattr(
        checkpoint.Checkpoints, "_write", lambda *args: changed.wait() and write(*args)
    )
    checkpoints.save(1, {"a": array}, window=window)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(array))
    window.clear()
    changed.set()
    checkpoints.wait()
    restored, info = checkpoints.restore(1, {"a": jax.ShapeDtypeStruct((1000,), jnp.float32)})
    np.testing.assert_array_equal(restored["a"], np.arange(1000.0))
    assert info["window"] == [1, 2]


def test_the_latest_and_the_best_are_kept(tmp_path):
    scores = {1: 3.0, 2: 2.0, 3: 2.5, 5: 2.0, 6: 2.1}
    checkpoints = saved(tmp_path, [1, 2, 3, 4, 5, 6], scores, keep=2)
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best_step() == 2 and checkpoints.score(2) == 2.0
    assert saved(tmp_path / "one", [1, 2, 3], keep=1).steps() == [3]
    assert saved(tmp_path / "one", [], keep=1).best_step() is None


def test_the_best_is_of_scores_of_one_kind(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=9)
    valid, test = ({"split": split, "metric": "bits_per_dim"} for split in ("valid", "test"))
    for step, score, kind in [(1, 1.0, valid), (2, 3.0, test), (3, 2.5, test), (4, 2.7, test)]:
        checkpoints.save(step, state(step), score, scored=kind)
    checkpoints.save(5, state(5))
    checkpoints.wait()
    assert checkpoints.best_step() == 3
    shutil.rmtree(checkpoints.folder / "4")
    checkpoints.save(6, state(6), 1.2, scored=valid)
    checkpoints.wait()
    assert checkpoints.best_step() == 1


def test_a_temporary_checkpoint_leaves_no_trace(tmp_path):
    """Steps, best, average and the steps before: all are those of a run that saved none."""
    like = jax.eval_shape(lambda: state().params)
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
    kept = {}
    for step in range(1, 11):
        scheduled = step % 3 == 0
        checkpoints.save(
            step, state(step), step + 1.0 if scheduled else None, temporary=not scheduled
        )
        checkpoints.wait()
        kept[step] = checkpoints.steps()
    assert kept[2] == [1, 2] and kept[3] == [3] and kept[5] == [3, 4, 5] and kept[8] == [3, 6, 7, 8]
    assert kept[9] == [3, 6, 9] and kept[10] == [3, 6, 9, 10]
    assert checkpoints.previous(10) == 9 and checkpoints.previous(9) == 6
    assert restore_average(checkpoints, 3, like)[1] == [3, 6, 9]
    with pytest.raises(ValueError, match=r"has 3 \(3, 6, 9; 10 is .* is temporary"):
        restore_average(checkpoints, 4, like)
    alone = checkpoint.Checkpoints(tmp_path / "alone", keep=1)
    for step in (1, 2):
        alone.save(step, state(step), temporary=True)
    alone.wait()
    assert alone.steps() == [2] and alone.newest_whole() == 2 and alone.previous(2) is None


def test_a_step_can_be_saved_again_with_its_score(tmp_path):
    checkpoints = saved(tmp_path, [3])
    checkpoints.save(3, state(), 1.5)
    checkpoints.wait()
    assert checkpoints.steps() == [3] and checkpoints.best_step() == 3
    assert not list(checkpoints.folder.glob("tmp*"))


def restore_average(checkpoints, n, like):
    """(mean, steps) of the last `n` checkpoints."""
    steps = list(last_configs(checkpoints, n))
    return restore_mean(checkpoints, steps, like)[0], steps


def test_an_average_is_of_the_last_without_a_gap(tmp_path):
    like = jax.eval_shape(lambda: state().params)
    checkpoints = saved(tmp_path, [1, 2, 3, 4], {1: 0.5}, keep=2)
    assert checkpoints.steps() == [1, 3, 4]
    mean, steps = restore_average(checkpoints, 2, like)
    assert steps == [3, 4]
    np.testing.assert_array_equal(mean["w"], state(3.5).params["w"])
    with pytest.raises(ValueError, match=r"average:3 needs the last 3 .* has 2 \(3, 4; 1 is") as e:
        restore_average(checkpoints, 3, like)
    assert "loop.train.keep=3" in one_line(e)
    # A run that goes on and keeps more does not close the gap.
    later = saved(tmp_path, [5, 6], keep=5)
    assert later.steps() == [1, 3, 4, 5, 6]
    assert restore_average(later, 4, like)[1] == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="average:5 needs the last 5"):
        restore_average(later, 5, like)
    # Where the best is the one right before the others there is no gap.
    near = saved(tmp_path / "near", [1, 2, 3], {1: 0.5}, keep=2)
    assert restore_average(near, 3, like)[1] == [1, 2, 3]
    with pytest.raises(ValueError, match="average:0 must be of at least 1 checkpoint"):
        restore_average(near, 0, like)
    with pytest.raises(ValueError, match=r"has 0 \(none\)"):
        restore_average(checkpoint.Checkpoints(tmp_path / "nothing"), 1, like)


def test_the_moving_average_is_what_is_scored(tmp_path):
    like = jax.eval_shape(lambda: state().params)
    plain, _ = saved(tmp_path / "plain").restore_params(3, like)
    average, _ = saved(tmp_path / "ema", ema=True).restore_params(3, like)
    np.testing.assert_array_equal(plain["w"], state().params["w"])
    np.testing.assert_array_equal(average["w"], state().params["w"] + 1)


def test_a_sum_of_checkpoints_loses_no_digit(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=3)
    for step, w in ((1, 2.0**24), (2, 1.0), (3, 1.0)):  # in float32 the ones would be lost
        checkpoints.save(step, TrainState(jnp.int32(step), {"w": jnp.full(2, w)}, (), None))
    checkpoints.wait()
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert restore_average(checkpoints, 3, like)[0]["w"][0] == np.float32((2**24 + 2) / 3)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_one_that_is_whole_says_nothing_of_another(tmp_path):
    checkpoints = saved(tmp_path, [1, 2])
    arrays = (checkpoints.folder / "1" / "arrays").rglob("*")
    change(max(filter(Path.is_file, arrays), key=lambda path: path.stat().st_size))
    assert checkpoints.newest_whole() == 2
    with pytest.raises(ValueError, match="checkpoint .*/1 is damaged"):
        checkpoints.restore(1, jax.eval_shape(state))


def test_damage_of_the_only_checkpoint(tmp_path):
    checkpoints = saved(tmp_path, [2])
    cut(checkpoints.folder / "2" / "checkpoint.json")
    assert checkpoints.best_step(skip_unreadable=True) is None
    for read in (checkpoints.best_step, lambda: checkpoints.restore(2, jax.eval_shape(state))):
        with pytest.raises(ValueError, match="no other is whole, copy one back"):
            read()
    with pytest.raises(ValueError, match="no checkpoint in .* is whole .2: checkpoint.json has"):
        checkpoints.newest_whole()
    checkpoints.tidy(pytest.fail)
    assert checkpoints.steps() == [2]


def test_another_model_is_told_by_its_first_tensor(tmp_path):
    checkpoints = saved(tmp_path)
    with pytest.raises(ValueError) as error:
        checkpoints.restore(3, jax.eval_shape(lambda: state(d=6)))
    line = one_line(error)
    assert "params.w has shape (2, 4) there and shape (2, 6) in this config" in line
    assert "another model" in line and "output_dir" in line
    with pytest.raises(ValueError, match="another model"):
        checkpoints.restore_params(3, {"w": jnp.zeros((2, 6))})
    with pytest.raises(ValueError, match="params.half has shape .* there and no such tensor"):
        checkpoints.restore_params(3, {"empty": jnp.zeros((0, 3)), "w": jnp.zeros((2, 4))})


def test_another_optimizer_is_told(tmp_path):
    checkpoints = saved(tmp_path)
    with pytest.raises(ValueError, match="another optimizer.*opt_state.1.mu has shape"):
        checkpoints.restore(3, jax.eval_shape(lambda: state(momentum=False)))
    with pytest.raises(ValueError, match="ema_decay.*ema.empty has no such tensor there"):
        checkpoints.restore(3, jax.eval_shape(lambda: state(ema=True)))


def test_another_format_is_told(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path)
    monkeypatch.setattr(description, "FORMAT", description.FORMAT + 1)
    with pytest.raises(ValueError, match="checkpoint format 3 and this version reads 4"):
        checkpoints.restore(3, jax.eval_shape(state))


def test_a_missing_step_is_told_with_those_there(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of step 7 .* there is 2, 3"):
        saved(tmp_path, [2, 3]).restore(7, jax.eval_shape(state))


def test_a_failed_write_is_raised_and_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1])

    def full(path, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(manifest, "fingerprint", full)
    checkpoints.save(2, state(2))
    with pytest.raises(OSError, match="checkpoint of step 2 is not saved.*No space"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.tidy(pytest.fail)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["1"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_in_progress_once_a_save_has_failed(tmp_path):
    """A limit of the size of files: many writes fail at the same time."""
    rng = np.random.default_rng(0)
    tensors = {f"tensor{i}": rng.normal(size=4096) for i in range(30)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        for attempt in range(5):
            with pytest.raises(Exception, match="File too large"):
                save_arrays(tmp_path / f"{attempt}", tensors)
            shutil.rmtree(next(tmp_path.iterdir()))
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


class OtherMachine:
    """The second of two processes, which the first one tells what it sees."""

    index, count, first = 1, 2, False

    def __init__(self, told):
        self._told = iter(told)

    def branch(self, name):
        return self

    def broadcast(self, decide):
        return next(self._told)

    def by_all(self, do):
        return [None, do()]


@pytest.mark.parametrize("listed", [True, False])
def test_what_another_machine_sees_is_waited_for(tmp_path, listed):
    saved(tmp_path, steps=(3,)).close()
    file, aside = tmp_path / "checkpoints/3/checkpoint.json", tmp_path / "checkpoint.json"
    file.rename(aside)
    shown = threading.Timer(0.2, lambda: aside.rename(file))
    shown.start()
    checkpoints = checkpoint.Checkpoints(tmp_path, processes=OtherMachine([[3], listed]))
    if listed:
        assert checkpoints.newest_whole() == 3
    else:  # process 0 does not see them either
        with pytest.raises(ValueError, match="is whole .*is missing"):
            checkpoints.newest_whole()
    shown.join()
    checkpoints.close()


def read_bytes():
    """The bytes that this process and those that it waited for have read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_of_a_tensor_little_more_is_read_than_a_region(tmp_path):
    """Of one that a single process wrote, so that others share the work when they go on."""
    tensor = np.random.default_rng(0).normal(size=(4096, 1024)).astype(np.float32)  # 16 MB
    save_arrays(tmp_path / "arrays", {"a": tensor})
    amounts = []
    for rows in (1024, 4096):
        region, before = (slice(0, rows), slice(0, 1024)), read_bytes()
        wanted = {"a": array_reader.Wanted(tensor.shape, tensor.dtype, [region])}
        np.testing.assert_array_equal(arrays.restore(tmp_path, wanted)["a"][0], tensor[region])
        amounts.append(read_bytes() - before)
    assert amounts[1] - amounts[0] > 0.6 * tensor.nbytes, amounts


def test_the_index_of_many_tensors_is_read_once(tmp_path):
    shape, dtype = (64, 16), np.dtype(np.float32)
    tensors = {f"{i}": np.random.default_rng(i).normal(size=shape).astype(dtype) for i in range(99)}
    save_arrays(tmp_path / "arrays", tensors)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    wanted = {n: array_reader.Wanted(shape, dtype, [array_reader.whole(shape)]) for n in tensors}
    before = read_bytes()
    out = array_reader.restore(tmp_path, wanted)
    assert read_bytes() - before < 1.1 * size, (read_bytes() - before, size)
    assert all((out[name][0] == tensors[name]).all() for name in tensors)


ON_A_MESH = """
import sys, jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
from reformax.training.checkpoint import Checkpoints

def over(n, *spec):
    return NamedSharding(Mesh(np.array(jax.devices()[:n]), ("x",)), P(*spec))

state = {
    "a": jax.device_put(jnp.arange(4096.0).reshape(64, 64), over(4, "x")),
    "b": jax.device_put(jnp.arange(5, dtype=jnp.bfloat16), over(4)),
    "none": jnp.zeros((0, 3)),
}
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, state)
checkpoints.wait()
for n, spec in [(4, ("x",)), (4, (None, "x")), (2, ("x",)), (1, ())]:
    shardings = {"a": over(n, *spec), "b": over(n), "none": over(n)}
    found, _ = checkpoints.restore(1, state, shardings)
    for name, array in found.items():
        assert isinstance(array, jax.Array) and array.sharding == shardings[name], name
        assert array.dtype == state[name].dtype
        np.testing.assert_array_equal(array, state[name])
by_orbax = ocp.PyTreeCheckpointer().restore(sys.argv[1] + "/checkpoints/1/arrays")
np.testing.assert_array_equal(by_orbax["a"], state["a"])
"""


def test_a_state_comes_back_on_the_mesh_that_is_wanted(tmp_path):
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-c", ON_A_MESH, str(tmp_path)]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
