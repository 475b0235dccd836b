"""Reads pickles of arrays and containers without running their code.

A pickle is a program: it names functions and calls them. This reader gives it none. Each name in
its table stands for a class below that builds an array or a record from plain values. Every other
name is refused before it is looked up, and no module is imported for a pickle. NumPy's own
functions are not called either: an array is made from its bytes, dtype and shape, after a check
that they fit.

Names of Trax's modules become a `Record`, which stores its arguments and does nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

# A file may unpack to so many bytes, or to so many times its own size, whichever is more.
MAX_UNPACKED = 2**30
MAX_INFLATION = 20

_NUMBER = re.compile(r"[<>=|]?(?:b1|[iu][1248]|f[248]|c8|c16)")


class UnsafePickle(ValueError):
    """A pickle that names more than arrays and containers."""


class Record:
    """An object of one of Trax's classes: its arguments and its state."""

    name = "Record"  # module and class in Trax

    def __new__(cls, *args, **kwargs):
        record = object.__new__(cls)
        record.args, record.state = (*args, *kwargs.values()), {}
        return record

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        # A class with __slots__ has two states: its dict and its slots.
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                object.__getattribute__(self, "state").update(part)

    def __repr__(self):
        return f"{self.name}{self.args or self.state}"


class _Fixed(type):
    """Classes that a pickle cannot change."""

    def __setattr__(cls, name, value):
        raise UnsafePickle(f"it sets {name!r} of a class")


class _Stub:
    """Stands for a function: a pickle can call it and do nothing else with it."""

    __slots__ = ()

    def __setstate__(self, state):
        raise UnsafePickle(f"it sets the state of a function, {state!r:.60}")

    def __setattr__(self, name, value):
        raise UnsafePickle(f"it sets {name!r} of a function")


class _Dtype:
    def __init__(self, spec, *flags):
        if not (spec is _BFLOAT16 or (isinstance(spec, str) and _NUMBER.fullmatch(spec))):
            raise UnsafePickle(f"an array has dtype {spec!r:.60}: expected numbers")
        self._dtype = np.dtype(jnp.bfloat16 if spec is _BFLOAT16 else spec)

    def __setstate__(self, state):
        # (version, byte order, then fields, which numbers do not have)
        if state[1] in ("<", ">") and self._dtype.itemsize > 1:
            self._dtype = self._dtype.newbyteorder(state[1])

    def array(self, data, shape, order="C") -> np.ndarray:
        if isinstance(data, str):
            data = data.encode("latin1")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = math.prod(shape) * self._dtype.itemsize
        if not all(isinstance(n, int) and n >= 0 for n in shape) or len(data) != size:
            raise UnsafePickle(f"an array of shape {shape} and {self._dtype} has {len(data)} bytes")
        array = np.frombuffer(data, self._dtype).reshape(shape, order="F" if order == "F" else "C")
        return array.astype(self._dtype.newbyteorder("="))  # a writable copy


class _Array:
    """An array that is filled after it is made."""

    def __init__(self):
        self.value = None

    def __setstate__(self, state):
        _version, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | str):
            raise UnsafePickle("an array holds objects: expected numbers")
        self.value = dtype.array(data, shape, "F" if is_fortran else "C")


class _MakeDtype(_Stub):
    def __call__(self, spec, *flags):
        return spec if isinstance(spec, _Dtype) else _Dtype(spec)


class _MakeArray(_Stub):
    def __call__(self, subtype, shape, typecode):
        return _Array()


class _MakeScalar(_Stub):
    def __call__(self, dtype, data):
        return dtype.array(data, ())[()]


class _FromBuffer(_Stub):
    def __call__(self, data, dtype, shape, order="C"):
        return dtype.array(data, shape, order)


class _MakeJaxArray(_Stub):
    def __call__(self, make, args, state, aval_state):
        array = _Array()
        array.__setstate__(state)
        return array.value


class _Encode(_Stub):
    def __call__(self, text, encoding):
        if encoding not in ("latin1", "latin-1"):
            raise UnsafePickle(f"it encodes as {encoding!r:.60}")
        return text.encode("latin1")


class _NoBytes(_Stub):
    """Makes empty bytes, as protocol 2 does."""

    def __call__(self):
        return b""


class _Reconstruct(_Stub):
    """Makes an instance of a class, as protocol 1 does."""

    def __call__(self, cls, base, state):
        if not (isinstance(cls, type) and issubclass(cls, Record)):
            raise UnsafePickle(f"it makes an instance of {cls!r:.60}")
        return cls()


class _Token(_Stub):
    """Stands for a type: passed on as an argument, never called."""

    def __call__(self, *args):
        raise UnsafePickle("it calls a type")


_BFLOAT16, _NDARRAY, _OBJECT = _Token(), _Token(), _Token()
_KNOWN = {
    "numpy.dtype": _MakeDtype(),
    "numpy.ndarray": _NDARRAY,
    "ml_dtypes.bfloat16": _BFLOAT16,
    "jax._src.array._reconstruct_array": _MakeJaxArray(),
    "jax.array._reconstruct_array": _MakeJaxArray(),
    "_codecs.encode": _Encode(),
    "collections.OrderedDict": OrderedDict,
}
for _copyreg, _builtins in (("copyreg", "builtins"), ("copy_reg", "__builtin__")):
    _KNOWN[f"{_copyreg}._reconstructor"] = _Reconstruct()
    _KNOWN[f"{_builtins}.object"] = _OBJECT
    _KNOWN[f"{_builtins}.bytes"] = _NoBytes()
_SCALARS = {"bool_", *(f"{k}int{n}" for k in ("", "u") for n in (8, 16, 32, 64))}
_SCALARS |= {"float16", "float32", "float64"}
for _package in ("numpy.core", "numpy._core"):  # before and since NumPy 2
    _KNOWN[f"{_package}.multiarray._reconstruct"] = _MakeArray()
    _KNOWN[f"{_package}.multiarray.scalar"] = _MakeScalar()
    _KNOWN[f"{_package}.numeric._frombuffer"] = _FromBuffer()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file, encoding="latin1")
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if module == "numpy" and name in _SCALARS:
            return _Dtype(np.dtype(name).str)
        if module.split(".")[0] == "trax":
            if full not in self._records:
                self._records[full] = _Fixed("Record", (Record,), {"name": full})
            return self._records[full]
        raise UnsafePickle(f"it names {full}, which is neither an array nor a container")

    def persistent_load(self, pid):
        raise UnsafePickle(f"it names an object outside of it, {pid!r:.60}")


def loads(data: bytes, where: str) -> Any:
    """Reads a pickle of plain values, containers, NumPy arrays and `Record`s.

    Args:
      data: the pickle.
      where: its name in errors.

    Raises:
      ValueError: it names anything else, is cut short, or is no pickle. None of its code ran.
    """
    try:
        return _finished(_Unpickler(io.BytesIO(data)).load())
    except UnsafePickle as error:
        raise UnsafePickle(f"{where} is refused: {error}") from None
    except Exception as error:  # bytes that are no pickle may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where} is damaged or is no pickle ({reason}): copy it again") from None


def _finished(tree: Any) -> Any:
    """The tree with an array in place of each `_Array`."""
    done: dict[int, Any] = {}

    def walk(node):
        if isinstance(node, _Array):
            if node.value is None:
                raise UnsafePickle("an array has no content")
            return node.value
        if isinstance(node, _Dtype):
            return node._dtype
        if isinstance(node, Record | dict | list | tuple):
            if id(node) in done:
                return done[id(node)]
            done[id(node)] = node  # a container may hold itself
        if isinstance(node, Record):
            node.args, node.state = walk(node.args), walk(node.state)
        elif isinstance(node, dict):
            for key in node:
                node[key] = walk(node[key])
        elif isinstance(node, list):
            node[:] = [walk(item) for item in node]
        elif isinstance(node, tuple):
            done[id(node)] = tuple(walk(item) for item in node)
            return done[id(node)]
        elif isinstance(node, _Stub | type):
            raise UnsafePickle("it holds a function or a class")
        return node

    return walk(tree)


def unpacked(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a gzip file.

    Args:
      path: the file.
      max_bytes: the most it may unpack to; None: 1 GiB or 20 times its size, whichever is more.

    Raises:
      ValueError: the file is cut short, is no gzip file, or unpacks to more.
      OSError: the file cannot be read.
    """
    packed = path.read_bytes()
    if max_bytes is None:
        max_bytes = max(MAX_UNPACKED, MAX_INFLATION * len(packed))
    parts, left = [], max_bytes
    try:
        while packed:  # a file may have several members
            stream = zlib.decompressobj(wbits=31)
            parts.append(stream.decompress(packed, left + 1))
            left -= len(parts[-1])
            if left < 0:
                raise ValueError(
                    f"{path} unpacks to more than {max_bytes:,} bytes from {path.stat().st_size:,}:"
                    " refused as a decompression bomb"
                )
            if not stream.eof:
                raise ValueError(f"{path} is cut short: copy it again")
            packed = stream.unused_data.lstrip(b"\0")
    except zlib.error as error:
        raise ValueError(f"{path} is damaged or is no gzip file ({error}): copy it again") from None
    return b"".join(parts)
