"""Reads pickles of arrays and containers without running their code.

A pickle names functions and has them called. Python's unpickler looks names up in the table below,
whose entries build an array or a record of plain values. Every other name is refused, and no module
is imported for a pickle. NumPy's own functions are not called either: an array is made from its
bytes, dtype and shape, after a check that they fit.

Names of Trax's modules become a `PickledObject`, which stores its arguments and does nothing.

A small pickle can request any amount of memory or time: by one array used often, by containers that
hold each other twice at every level, by keys whose hashes collide. So opcodes and copied bytes are
counted, keys are text, and what comes back is a tree of limited size.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

# Opcodes of a pickle, and nodes of its tree with everything that is held twice counted twice. A
# checkpoint has about ten for each array and five for each entry of a training's history.
MAX_OPCODES = 2**21
# Containers within containers.
MAX_DEPTH = 100
# Bytes of all arrays together: so many times the pickle's. Some protocols store them as text, which
# is copied once more.
MAX_COPIES = 2
_SMALL = 2**20  # bytes that are allowed besides

_NUMBER = re.compile(r"[<>=|]?(?:b1|[iu][1248]|f[248]|c8|c16)")
_MAX_DIMS = 32
_MAX_ARGUMENTS = 100  # of a call
_ENTRY = 16  # bytes of an entry of a dict, at least
_CLASS = 2**11  # bytes of the class of a name
# Opcodes that no checkpoint has: a set hashes what it holds, an extension has no name, and what is
# outside of the pickle is not there.
_REFUSED = {"EMPTY_SET", "ADDITEMS", "FROZENSET", "EXT1", "EXT2", "EXT4", "INST", "OBJ"}
_REFUSED |= {"PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"}


class UnsafePickle(ValueError):
    """A pickle that names more than arrays and containers, or that requests too much."""


class PickledObject:
    """An object of one of Trax's classes: its name there, its arguments and its state."""

    name = ""

    def __new__(cls, *args):
        if len(args) > _MAX_ARGUMENTS:
            raise UnsafePickle(f"it calls {cls.name} with {len(args):,} arguments")
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        if self.state:
            raise UnsafePickle(f"it sets the state of {self.name}")
        # A class with __slots__ has two states: its dict, or None, and its slots.
        parts = state if isinstance(state, tuple) else (state,)
        states = [part for part in parts if isinstance(part, dict)]
        if len(states) > 1:
            raise UnsafePickle(f"it sets two states of {self.name}")
        self.state = states[0] if states else {}

    def __repr__(self):
        return self.name


class _Dtype:
    """A dtype of numbers, whose byte order a pickle sets after it is made."""

    def __init__(self, spec):
        is_bfloat16 = isinstance(spec, _Name) and spec.full == _BFLOAT16
        if not (is_bfloat16 or (isinstance(spec, str) and _NUMBER.fullmatch(spec))):
            raise UnsafePickle(f"an array has dtype {_shown(spec)}: expected numbers")
        self.value = np.dtype(jnp.bfloat16 if is_bfloat16 else spec)

    def __setstate__(self, state):
        # (version, byte order, then fields, which numbers do not have)
        if state[1] in ("<", ">") and self.value.itemsize > 1:
            self.value = self.value.newbyteorder(state[1])


class _Array:
    """An array, which may be filled after it is made."""

    def __init__(self, filled: Callable[[Any], np.ndarray], value: np.ndarray | None = None):
        self._filled, self.value = filled, value

    def __setstate__(self, state):
        if self.value is not None:
            raise UnsafePickle("it sets the state of an array twice")
        self.value = self._filled(state)


class _Name:
    """A name in a pickle. A call of it makes a value; without `make` no call is allowed."""

    def __init__(self, full: str, make: Callable | None = None):
        self.full, self._make = full, make

    def __call__(self, *args):
        if self._make is None:
            raise UnsafePickle(f"it calls {self.full}")
        if len(args) > _MAX_ARGUMENTS:
            raise UnsafePickle(f"it calls {self.full} with {len(args):,} arguments")
        return self._make(*args)

    def __setstate__(self, state):
        raise UnsafePickle(f"it sets the state of {self.full}")


def _shown(value: Any) -> str:
    """A value in a few words. The text of a nested one may be longer than any memory."""
    if isinstance(value, _Name):
        return value.full
    return repr(value[:60]) if isinstance(value, str | bytes) else f"a {type(value).__name__}"


_BFLOAT16 = "ml_dtypes.bfloat16"
_SCALARS = {"bool_", *(f"{k}int{n}" for k in ("", "u") for n in (8, 16, 32, 64))}
_SCALARS |= {"float16", "float32", "float64"}


class _Unpickler(pickle._Unpickler):
    """Python's unpickler in Python, whose steps can be changed."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._left = MAX_COPIES * len(data) + _SMALL
        self._n_nodes = 0
        makers = {
            _BFLOAT16: None,
            "numpy.dtype": lambda x, *flags: x if isinstance(x, _Dtype) else _Dtype(x),
            "numpy.ndarray": None,
            "jax._src.array._reconstruct_array": self._jax_array,
            "jax.array._reconstruct_array": self._jax_array,
            "_codecs.encode": self._encode,
            "collections.OrderedDict": self._ordered,
        }
        for copyreg, builtins in (("copyreg", "builtins"), ("copy_reg", "__builtin__")):
            makers[f"{copyreg}._reconstructor"] = self._instance
            makers[f"{builtins}.object"] = None
            makers[f"{builtins}.bytes"] = lambda: b""  # how protocol 2 makes empty ones
        for package in ("numpy.core", "numpy._core"):  # before and since NumPy 2
            makers[f"{package}.multiarray._reconstruct"] = lambda *like: _Array(self._filled)
            makers[f"{package}.multiarray.scalar"] = self._scalar
            makers[f"{package}.numeric._frombuffer"] = self._from_buffer
        self._known: dict[str, Any] = {x: _Name(x, make) for x, make in makers.items()}

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        full = f"{module}.{name}"
        if full not in self._known:
            if module == "numpy" and name in _SCALARS:
                return _Dtype(np.dtype(name).str)
            if not full.startswith("trax."):
                short = " ".join(full[:80].split())
                raise UnsafePickle(f"it names {short}, which is neither an array nor a container")
            self.take(_CLASS)
            self._known[full] = type("Record", (PickledObject,), {"name": full})
        return self._known[full]

    def take(self, n_bytes: int) -> None:
        """Counts bytes that are copied."""
        self._left -= n_bytes
        if self._left < 0:
            raise UnsafePickle("it copies more bytes than it has: it uses some many times")

    def _array(self, dtype: Any, data: Any, shape: Any, is_fortran: bool = False) -> np.ndarray:
        """An array of its bytes, once they fit its dtype and shape."""
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray | str):
            raise UnsafePickle("an array holds objects: expected numbers")
        shape = (shape,) if isinstance(shape, int) else shape
        if (
            not isinstance(shape, tuple | list)
            or len(shape) > _MAX_DIMS
            or not all(isinstance(n, int) and 0 <= n < 2**63 for n in shape)
        ):
            raise UnsafePickle(f"an array has a shape of {_shown(shape)}: expected sizes")
        if len(data) != math.prod(shape) * dtype.value.itemsize:
            raise UnsafePickle(
                f"an array of shape {tuple(shape)} and {dtype.value} has {len(data)} bytes"
            )
        self.take(len(data))
        if isinstance(data, str):
            data = data.encode("latin1")
        array = np.frombuffer(data, dtype.value).reshape(shape, order="F" if is_fortran else "C")
        return array.astype(dtype.value.newbyteorder("="))  # a writable copy

    def _filled(self, state: Any) -> np.ndarray:
        """An array of the state that NumPy gives one."""
        _version, shape, dtype, is_fortran, data = state
        return self._array(dtype, data, shape, bool(is_fortran))

    def _scalar(self, dtype, data):
        return _Array(self._filled, self._array(dtype, data, ())[()])

    def _from_buffer(self, data, dtype, shape, order="C"):
        return _Array(self._filled, self._array(dtype, data, shape, order == "F"))

    def _jax_array(self, make, args, state, aval_state):
        return _Array(self._filled, self._filled(state))

    def _encode(self, text, encoding):
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise UnsafePickle(f"it encodes {_shown(text)} as {_shown(encoding)}")
        self.take(len(text))
        return text.encode("latin1")

    def _ordered(self, pairs=()):
        """Makes a dict, as protocols 0 and 1 do for an OrderedDict."""
        self.take(_ENTRY * len(pairs))
        return _with_items({}, [x for key, value in pairs for x in (key, value)])

    def _instance(self, cls, base, state):
        """Makes an instance of a class, as protocols 0 and 1 do."""
        if not (isinstance(cls, type) and issubclass(cls, PickledObject)):
            raise UnsafePickle(f"it makes an instance of {_shown(cls)}")
        return cls()

    def _set_item(self):
        value, key = self.stack.pop(), self.stack.pop()
        _with_items(self.stack[-1], [key, value])

    def _set_items(self):
        pairs = self.pop_mark()
        _with_items(self.stack[-1], pairs)

    def _dict(self):
        pairs = self.pop_mark()  # which changes `append`
        self.append(_with_items({}, pairs))

    dispatch = pickle._Unpickler.dispatch | {
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _dict,
    }

    def tree(self, node: Any, depth: int = 0) -> Any:
        """The tree below a node, with an array in place of each `_Array`."""
        self._n_nodes += 1
        if self._n_nodes > MAX_OPCODES:
            raise UnsafePickle(f"it has more than {MAX_OPCODES:,} nodes, counting repetitions")
        if depth > MAX_DEPTH:
            raise UnsafePickle(f"it is nested deeper than {MAX_DEPTH} containers, or holds itself")

        def below(parts):
            return [self.tree(part, depth + 1) for part in parts]

        if isinstance(node, _Name | type):
            raise UnsafePickle("it holds a function or a class")
        if isinstance(node, _Array | _Dtype):
            if node.value is None:
                raise UnsafePickle("an array has no content")
            return node.value
        if isinstance(node, PickledObject):
            node.args, node.state = below((node.args, node.state))
        elif isinstance(node, dict):
            node.update(zip(node, below(node.values()), strict=True))
        elif isinstance(node, list):
            node[:] = below(node)
        elif isinstance(node, tuple):
            return tuple(below(node))
        return node


def _with_items(items: Any, pairs: list[Any]) -> dict[str, Any]:
    """Puts keys and values, in turns, into a dict."""
    if type(items) is not dict or len(pairs) % 2:
        raise UnsafePickle(f"it sets items of {_shown(items)}")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, str):  # the hash of another may take any time
            raise UnsafePickle(f"a key of a dict is {_shown(key)}: expected text")
        items[key] = value
    return items


def loads(data: bytes, where: str) -> Any:
    """Reads a pickle of plain values, lists, tuples, dicts, NumPy arrays and `PickledObject`s.

    Args:
      data: the pickle.
      where: its name in errors.

    Returns:
      A tree: no container holds itself, and none is nested deeper than `MAX_DEPTH`.

    Raises:
      ValueError: it names anything else, requests more than the limits above, is cut short, or is
        no pickle. None of its code ran.
    """
    try:
        for n, (opcode, *_) in enumerate(pickletools.genops(data)):
            if n == MAX_OPCODES:
                raise UnsafePickle(f"it has more than {MAX_OPCODES:,} opcodes")
            if opcode.name in _REFUSED:
                raise UnsafePickle(f"it needs the opcode {opcode.name}, which no checkpoint has")
        unpickler = _Unpickler(data)
        return unpickler.tree(unpickler.load())
    except UnsafePickle as error:
        raise UnsafePickle(f"{where} is refused: {error}") from None
    except Exception as error:  # bytes that are no pickle may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{where} is damaged or is no pickle ({reason}): copy it again") from None
