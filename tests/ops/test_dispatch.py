"""Which implementation a call gets."""

import types

import jax
import jax.numpy as jnp
import pytest

from reformax.declared import SettingError
from reformax.ops import lsh
from reformax.ops.calls import dispatch, this_gpu
from reformax.ops.calls.obstacles import KernelObstacles, kernel_obstacles

ANY = {"cudnn": None, "pallas": None}
IMPLS = (*dispatch.IMPLEMENTATIONS, dispatch.INTERPRETED)


@pytest.mark.parametrize(
    "gpu, obstacles, want",
    [
        (True, ANY, "cudnn"),
        (True, ANY | {"cudnn": "segment_ids"}, "pallas"),
        (True, ANY | {"cudnn": "segment_ids", "pallas": "a bias"}, "xla"),
        (True, {"pallas": None}, "pallas"),
        (True, {}, "xla"),
        (False, ANY, "xla"),
    ],
)
def test_auto_takes_the_first_without_an_obstacle(monkeypatch, gpu, obstacles, want):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None if gpu else "the backend 'cpu'")
    assert dispatch.choose_impl("auto", **obstacles) == want


@pytest.mark.parametrize("impl", IMPLS)
def test_what_does_not_pay_is_taken_where_it_is_asked_for_alone(monkeypatch, impl):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    assert dispatch.choose_impl("auto", pays=False, **ANY) == "xla"
    assert dispatch.choose_impl(impl, pays=False, **ANY) == impl


@pytest.mark.parametrize("impl", IMPLS)
def test_an_explicit_implementation_never_falls_back(monkeypatch, impl):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    assert dispatch.choose_impl(impl, **ANY) == impl
    if impl != "xla":
        message = f"^impl={impl!r} with scale=2: use impl='auto' or 'xla'$"
        with pytest.raises(NotImplementedError, match=message):
            dispatch.choose_impl(
                impl, **ANY | {"pallas" if impl in dispatch.KERNELS else impl: "scale=2"}
            )
    monkeypatch.setattr(this_gpu, "obstacle", lambda: "the backend 'cpu'")
    if impl in ("xla", dispatch.INTERPRETED):
        assert dispatch.choose_impl(impl, **ANY) == impl
    else:
        with pytest.raises(NotImplementedError, match=f"^impl='{impl}' with the backend 'cpu': "):
            dispatch.choose_impl(impl, **ANY)


def test_what_keeps_a_kernel_from_a_call():
    def x(size=64, dtype="float16"):
        return jax.ShapeDtypeStruct((1, 8, 2, size), jnp.dtype(dtype))

    def obstacles(*inputs, **options):
        found = kernel_obstacles(*inputs, **options)
        return found.call or found.chip, found.call

    assert obstacles(x(), x(), x(), bias=None, wrap=False, dropout=0.0) == (None, None)
    assert obstacles(x(), None, None) == (None, None)
    assert obstacles(x(), x(), x(), bias=None, scale=0.5) == ("scale=0.5", "scale=0.5")
    mixed = "dtypes=float16 and float32"
    assert obstacles(x(), x(dtype="float32"), x()) == (mixed, mixed)
    assert obstacles(x(256), None, x(256)) == (None, None)
    assert obstacles(x(), None, x(264)) == ("head size 264, which is above 256", None)
    narrow = obstacles(x(), None, x(136), most=128)
    assert narrow == ("head size 136, which is above 128", None)
    assert obstacles(x(dtype="float8_e5m2"), None, None) == ("dtype float8_e5m2", None)


@pytest.mark.parametrize(
    "capability, small", [("8.0", False), ("8.6", True), ("9.0", False), ("12.0", True)]
)
def test_rows_of_heads_that_do_not_fit_a_small_chip(monkeypatch, capability, small):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])

    def obstacle(size, dtype, **options):
        x = jax.ShapeDtypeStruct((1, 8, 2, size), jnp.dtype(dtype))
        return kernel_obstacles(x, x, x, **options).chip

    assert obstacle(128, "bfloat16") is None and obstacle(64, "float32") is None
    told = "head size 128 in float32 on a GPU whose blocks share 99 KiB, which is above 64"
    assert obstacle(128, "float32") == (told if small else None)
    assert bool(obstacle(128, "bfloat16", small_row=128)) == small


@pytest.mark.parametrize("found, want", [("9.0", 9.0), ("gfx942", 0.0), (None, 0.0)])
def test_a_gpu_of_another_maker_has_no_such_number(found, want):
    assert this_gpu.compute_capability(types.SimpleNamespace(compute_capability=found)) == want


def test_no_text_asks_for_the_interpreter():
    for text in (str(dispatch.INTERPRETED), "interpreted", "pallas_interpret", "INTERPRETED"):
        with pytest.raises(SettingError, match="impl is .*: expected 'auto', .* or 'mosaic'$"):
            lsh.lsh(impl=text)
    interpreted = lsh.lsh(impl=dispatch.INTERPRETED)
    assert interpreted == lsh.lsh(impl=dispatch.INTERPRETED)
    assert interpreted not in {lsh.lsh(impl="pallas"), lsh.lsh()}


@pytest.mark.parametrize("impl", ["auto", "pallas", "xla", dispatch.INTERPRETED])
def test_a_call_is_computed_by_the_implementation_that_is_chosen(monkeypatch, impl):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    too_large = KernelObstacles(call=None, chip="head size 256")

    def compute(impl, obstacle):
        pallas = obstacle, lambda interpret: interpret
        return dispatch.compute_by(impl, lambda: "arrays", pallas=pallas)

    if impl == "pallas":
        with pytest.raises(NotImplementedError, match="^impl='pallas' with head size 256: use"):
            compute(impl, too_large)
    else:  # the interpreter has no chip
        want = True if impl == dispatch.INTERPRETED else "arrays"
        assert compute(impl, too_large) == want
    assert compute("auto", None) is compute("pallas", None) is False
