"""Several devices: meshes that do not fit, and `eight.py` in a process that sees eight devices."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as Spec

from reformax import devices
from reformax.declared import SettingError, check
from reformax.models import TransformerMaskedLM
from reformax.ops import flash
from reformax.training import loss
from reformax.training import mesh as mesh_lib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_MESH = "evaluation", "carried"


def on_eight_devices(*arguments):
    """Runs tests in a process that sees eight devices."""
    flags = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *map(str, arguments)]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.every_part
def test_eight_devices_compute_what_one_does(pytestconfig):
    part = f"--part={pytestconfig.getoption('--part')}"
    on_eight_devices("-m", "", part, *(HERE / name for name in ("eight.py", "context.py")))


@pytest.mark.slow
@pytest.mark.every_part
def test_every_op_computes_in_shards_what_it_does_whole(pytestconfig):
    part = f"--part={pytestconfig.getoption('--part')}"
    on_eight_devices("-m", "", part, ROOT / "tests/ops/test_shards.py")


@pytest.mark.slow
def test_tests_of_one_device_pass_where_there_are_eight():
    """Those that build no mesh, and so get one of all devices."""
    on_eight_devices(*(ROOT / "tests/training" / f"test_training_{x}.py" for x in DEFAULT_MESH))


@pytest.mark.parametrize(
    "sizes, filled",
    [
        ({}, (8, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1)),
        ({"context": -1}, (1, 1, 8)),
        ({"data": 2, "fsdp": -1, "context": 2}, (2, 2, 2)),
    ],
)
def test_one_axis_of_a_mesh_fills_up(sizes, filled):
    assert tuple(mesh_lib.sizes_of(check("mesh", sizes, mesh_lib.Sizes), 8).values()) == filled


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"fsdp": 3},
            "mesh is {'fsdp': 3}: 3 does not divide the number of devices, 8: make fsdp 2, or show "
            r"JAX 3 of them \(CUDA_VISIBLE_DEVICES=0,1,2\)$",
        ),
        ({"context": 16}, r"8: make context 8, or simulate 16 on a CPU \(JAX_.*_DEVICES=16\)$"),
        ({"context": 7, "data": -1}, "7 does not divide .* 8: make context 4, or show JAX 7 of"),
        ({"data": 4}, "mesh is {'data': 4}: 4 is not .* 8: give sizes whose product is 8, or show"),
        ({"fsdp": 2, "context": 3}, "6 does not divide .* 8: give sizes whose product divides 8,"),
        ({"model": 2}, "mesh is {'model': 2}: expected sizes above 0 of some of data, fsdp and"),
        ({"fsdp": 0}, "mesh is {'fsdp': 0}: expected sizes above 0"),
        ({"data": -1, "fsdp": -1}, "one of them -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_in_one_line(sizes, message):
    with pytest.raises(SettingError, match=message) as error:
        mesh_lib.sizes_of(check("mesh", sizes, mesh_lib.Sizes), 8)
    assert "\n" not in str(error.value)


def test_weights_are_split_along_their_largest_axis_that_devices_divide(monkeypatch):
    monkeypatch.setattr(devices, "LEAST_SPLIT", 100)
    assert devices.stored_spec((3, 64, 256), 4) == Spec(None, None, "fsdp")
    assert devices.stored_spec((3, 256, 64), 4) == Spec(None, "fsdp")
    assert devices.stored_spec((64, 257), 4) == Spec("fsdp")
    assert devices.stored_spec((16, 16), 4) == Spec(None, "fsdp")
    assert devices.stored_spec((5, 7, 9), 4) == Spec()  # they divide nothing
    assert devices.stored_spec((4, 16), 4) == Spec()  # small
    assert devices.stored_spec((64, 256), 1) == Spec()


def test_a_loss_whose_logits_have_a_norm_takes_any_rows_that_devices_divide():
    """A device has one row of two positions."""
    sizes = dict(vocab_size=8, d_model=8, d_ff=8, n_heads=4, n_layers=1)
    model = TransformerMaskedLM(**sizes, attention_type=flash.flash(), dropout=0.0)
    params = jax.eval_shape(lambda: model.init_params(jax.random.PRNGKey(0), (4, 4)))
    types = (AxisType.Auto,) * len(devices.AXES)
    mesh = SimpleNamespace(size=8, abstract_mesh=AbstractMesh((2, 2, 2), devices.AXES, types))

    def loss_of(params, tokens):
        features = model.features(params, tokens)
        weights = jnp.ones(tokens.shape)
        return loss.cross_entropy(model.logits, params, features, tokens, weights).loss

    tokens = jax.ShapeDtypeStruct((4, 4), np.int32)
    gradient = jax.eval_shape(devices.on(mesh, jax.grad(loss_of)), params, tokens)
    assert jax.tree.map(lambda x: x.shape, gradient) == jax.tree.map(lambda x: x.shape, params)


def test_without_a_mesh_nothing_is_split():
    rows = np.arange(6.0).reshape(3, 2)
    assert devices.current() is None and devices.n_row_shards() == 1 and devices.row_axes() == ()
    assert devices.gathered(rows) is rows and devices.stored(rows) is rows
    assert devices.by_rows(lambda x, y: x + y, (rows,), (1,)).tolist() == (rows + 1).tolist()
    one = mesh_lib.make(devices=jax.devices()[:1])
    assert devices.on(one, max) is max
