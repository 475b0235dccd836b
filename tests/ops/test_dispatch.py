"""Which implementation a call gets."""

import types

import jax
import jax.numpy as jnp
import pytest

from reformax.ops.calls import dispatch

ANY = {"cudnn": None, "pallas": None, "pallas_interpret": None}


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
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: None if gpu else "the backend 'cpu'")
    assert dispatch.choose_impl("auto", **obstacles) == want


@pytest.mark.parametrize("impl", dispatch.IMPLEMENTATIONS)
def test_what_does_not_pay_is_taken_where_it_is_asked_for_alone(monkeypatch, impl):
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: None)
    assert dispatch.choose_impl("auto", pays=False, **ANY) == "xla"
    assert dispatch.choose_impl(impl, pays=False, **ANY) == impl


@pytest.mark.parametrize("impl", dispatch.IMPLEMENTATIONS)
def test_an_explicit_implementation_never_falls_back(monkeypatch, impl):
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: None)
    assert dispatch.choose_impl(impl, **ANY) == impl
    if impl != "xla":
        message = f"^impl='{impl}' with scale=2: use impl='auto' or 'xla'$"
        with pytest.raises(NotImplementedError, match=message):
            dispatch.choose_impl(impl, **ANY | {impl: "scale=2"})
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "the backend 'cpu'")
    if impl in ("xla", "pallas_interpret"):
        assert dispatch.choose_impl(impl, **ANY) == impl
    else:
        with pytest.raises(NotImplementedError, match=f"^impl='{impl}' with the backend 'cpu': "):
            dispatch.choose_impl(impl, **ANY)


def test_what_keeps_a_kernel_from_a_call():
    def x(size=64, dtype="float16"):
        return jax.ShapeDtypeStruct((1, 8, 2, size), jnp.dtype(dtype))

    def obstacles(*inputs, **options):
        found = dispatch.kernel_obstacles(*inputs, **options)
        return found["pallas"], found["pallas_interpret"]

    assert obstacles(x(), x(), x(), bias=None, wrap=False, dropout=0.0) == (None, None)
    assert obstacles(x(), None, None) == (None, None)
    assert obstacles(x(), x(), x(), bias=None, scale=0.5) == ("scale=0.5", "scale=0.5")
    mixed = "dtypes=float16 and float32"
    assert obstacles(x(), x(dtype="float32"), x()) == (mixed, mixed)
    assert obstacles(x(), None, x(136)) == ("head size 136, which is above 128", None)
    assert obstacles(x(dtype="float8_e5m2"), None, None) == ("dtype float8_e5m2", None)


@pytest.mark.parametrize("found, want", [("9.0", 9.0), ("gfx942", 0.0), (None, 0.0)])
def test_a_gpu_of_another_maker_has_no_such_number(found, want):
    assert dispatch.compute_capability(types.SimpleNamespace(compute_capability=found)) == want
