"""Arrays of a pickle come back. Every other name in it is refused and never runs."""

import collections
import os
import pickle
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from reformax.convert import safe_pickle

ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    np.array(3, np.uint8),
    np.zeros((0, 4), np.float16),
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
    np.asarray(jnp.arange(3, dtype=jnp.bfloat16)),
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_come_back(array, protocol):
    for a in (array, jnp.asarray(array.astype(array.dtype.newbyteorder("=")))):
        got = safe_pickle.loads(pickle.dumps([a, {"x": (a,)}], protocol), "it")
        for b in (got[0], got[1]["x"][0]):
            a = np.asarray(a)
            assert (b.dtype, b.shape) == (a.dtype.newbyteorder("="), a.shape)
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_plain_values_and_containers_come_back(protocol):
    tree = {
        "a": [1, 2.5, None, True, "text", b"\xffbytes", (), 2**80],
        "scalar": np.float32(1.5),
        "dtype": np.dtype("int32"),
        "ordered": collections.OrderedDict(x=1, y=(2, [3])),
    }
    assert safe_pickle.loads(pickle.dumps(tree, protocol), "it") == tree


def test_a_container_that_holds_itself_is_refused():
    loop = [1]
    loop.append((loop,))
    with pytest.raises(safe_pickle.UnsafePickle, match="or holds itself"):
        safe_pickle.loads(pickle.dumps(loop), "it")


def test_what_is_held_twice_comes_back_twice():
    shared = [np.ones(2), (3,)]
    got = safe_pickle.loads(pickle.dumps([shared, {"x": shared}]), "it")
    assert got[0] is got[1]["x"] and got[0][1] == (3,)


def pickled_with_trax(tmp_path):
    """An old file: a History and named tuples of `trax.supervised`, pickled by their classes."""
    code = """
import sys, types, pickle, collections
import numpy as np
module = types.ModuleType("trax.supervised.trainer_lib")
OptState = collections.namedtuple("OptState", ["weights", "slots", "opt_params"])
class History:
    def __init__(self):
        self._values = {"train": [1.0]}
class ShapeDtype:
    __slots__ = ["shape", "dtype"]
for name, cls in dict(OptState=OptState, History=History, ShapeDtype=ShapeDtype).items():
    cls.__module__ = module.__name__
    cls.__qualname__ = name
    setattr(module, name, cls)
sys.modules.update({"trax": module, "trax.supervised": module, module.__name__: module})
s = ShapeDtype()
s.shape, s.dtype = (2, 3), np.dtype("int32")
d = {"opt": OptState([np.ones(2)], None, {}), "history": History(), "input_signature": s}
for protocol in (2, 4):
    pickle.dump(d, open(f"{sys.argv[1]}/old{protocol}.pkl", "wb"), protocol)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    return [(tmp_path / f"old{protocol}.pkl").read_bytes() for protocol in (2, 4)]


def test_classes_of_trax_become_records_and_are_not_imported(tmp_path, monkeypatch):
    pickles = pickled_with_trax(tmp_path)
    monkeypatch.setitem(sys.modules, "trax", None)  # any import of it would fail
    for data in pickles:
        got = safe_pickle.loads(data, "it")
        np.testing.assert_array_equal(got["opt"].args[0][0], np.ones(2))
        assert got["opt"].name == "trax.supervised.trainer_lib.OptState"
        assert got["history"].state == {"_values": {"train": [1.0]}}
        assert got["input_signature"].state == {"shape": (2, 3), "dtype": np.dtype("int32")}


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


def object_array(item):
    array = np.empty(1, object)
    array[0] = item
    return array


MARKER = "reformax-was-here"
HOSTILE = {
    "os.system": lambda p: pickle.dumps(Calls(os.system, f"touch {p}")),
    "eval": lambda p: pickle.dumps(
        {"flat_weights": [np.ones(2), Calls(eval, f"open({p!r}, 'w')")]}
    ),
    "subprocess": lambda p: pickle.dumps([Calls(subprocess.Popen, ["touch", p])]),
    "in an array of objects": lambda p: pickle.dumps(object_array(Calls(os.system, f"touch {p}"))),
    "protocol 0": lambda p: pickle.dumps(Calls(os.system, f"touch {p}"), 0),
    "GLOBAL": lambda p: f"cos\nsystem\n(S'touch {p}'\ntR.".encode(),
    "INST": lambda p: f"(S'touch {p}'\nios\nsystem\n.".encode(),
    "OBJ": lambda p: f"(cos\nsystem\nS'touch {p}'\no.".encode(),
    "STACK_GLOBAL": lambda p: (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(f"touch {p}")])
        + f"touch {p}".encode()
        + b"\x85R."
    ),
    "NEWOBJ": lambda p: b"\x80\x02csubprocess\nPopen\nX\x04\x00\x00\x00true\x85\x81.",
    "BUILD of a function": lambda p: b"\x80\x02cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.",
    "BUILD of a function's slots": lambda p: (
        b"\x80\x02cnumpy\ndtype\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."
    ),
    "BUILD of a class": lambda p: (
        b"\x80\x02ctrax.shapes\nShapeDtype\nN}X\x01\x00\x00\x00aK\x01s\x86b."
    ),
    "an attribute of a module": lambda p: b"\x80\x04\x8c\x05numpy\x8c\x0aos.system\x93.",
    "numpy's own loader": lambda p: pickle.dumps(Calls(np.load, p)),
    "getattr": lambda p: b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'x'\ntR.",
    "persistent id": lambda p: b"Pother\n.",
    "extension": lambda p: b"\x80\x02\x82\x01.",
    "a function as a value": lambda p: b"\x80\x02cnumpy\ndtype\n.",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_pickle_is_refused_in_one_line(attack, tmp_path):
    marker = tmp_path / MARKER
    with pytest.raises(ValueError) as raised:
        safe_pickle.loads(HOSTILE[attack](str(marker)), "model.pkl.gz")
    assert not marker.exists()
    assert str(raised.value).startswith("model.pkl.gz is ") and "\n" not in str(raised.value)


def test_the_attacks_are_real(tmp_path):
    """Python's own `pickle` runs the code that is refused above."""
    for attack in ("os.system", "in an array of objects", "GLOBAL", "INST", "OBJ", "STACK_GLOBAL"):
        marker = tmp_path / attack.replace(" ", "_")
        pickle.loads(HOSTILE[attack](str(marker)))
        assert marker.exists(), attack


@pytest.mark.parametrize(
    "data, name",
    [
        (pickle.dumps(Calls(os.system, "true")), f"{os.name}.system"),
        (pickle.dumps(Calls(eval, "1")), "builtins.eval"),
        (pickle.dumps([np.ones(1), Calls(subprocess.call, "true")]), "subprocess.call"),
        (pickle.dumps(object_array(Calls(os.system, "true"))), "dtype 'O8'"),
        (pickle.dumps(np.array(["text"], object)), "dtype 'O8'|objects"),
        (pickle.dumps(np.array([("a", 1)], "U1,i4")), "dtype 'V8'"),
    ],
)
def test_the_refusal_names_what_it_refuses(data, name):
    with pytest.raises(safe_pickle.UnsafePickle, match=name):
        safe_pickle.loads(data, "it")


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_is_cut_short(protocol):
    data = pickle.dumps({"flat_weights": [np.arange(50.0)]}, protocol)
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="it is (damaged or is no pickle|refused)") as raised:
            safe_pickle.loads(data[:end], "it")
        assert "\n" not in str(raised.value)


def test_an_array_of_other_size_than_its_shape():
    data = pickle.dumps(np.arange(4.0), 2).replace(b"K\x04\x85", b"K\x05\x85")
    with pytest.raises(safe_pickle.UnsafePickle, match=r"shape \(5,\) and float64 has 32 bytes"):
        safe_pickle.loads(data, "it")
