"""Reads pickles of arrays and containers without running their code.

A pickle is a program for a stack machine: it names functions and calls them. `pickletools` decodes
it, and the machine below has no functions. Each name in its table maps to a few lines that
build an array or a record from plain values. Every other name, and every opcode that a checkpoint
does not need, is refused, and no module is imported for a pickle. NumPy's own functions are not
called either: an array is made from its bytes, dtype and shape, after a check that they fit.

Names of Trax's modules become a `PickledObject`, which stores its arguments and does nothing.

A small pickle can request any amount of memory or time: by one array used often, by containers that
hold each other twice at every level, by keys whose hashes collide. So the machine counts opcodes
and the bytes that it copies, keys are text, and what comes back is a tree of limited size.
"""

from __future__ import annotations

import math
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


class UnsafePickle(ValueError):
    """A pickle that names more than arrays and containers, or that requests too much."""


class PickledObject:
    """An object of one of Trax's classes: its name there, its arguments and its state."""

    def __init__(self, name: str, args: tuple = ()):
        self.name, self.args = name, args
        self.state: dict[str, Any] = {}

    def __repr__(self):
        return self.name


class _Dtype:
    """A dtype of numbers, whose byte order a pickle sets after it is made."""

    def __init__(self, spec):
        if not (spec is _BFLOAT16 or (isinstance(spec, str) and _NUMBER.fullmatch(spec))):
            raise UnsafePickle(f"an array has dtype {_shown(spec)}: expected numbers")
        self.value = np.dtype(jnp.bfloat16 if spec is _BFLOAT16 else spec)

    def set_state(self, state):
        # (version, byte order, then fields, which numbers do not have)
        if state[1] in ("<", ">") and self.value.itemsize > 1:
            self.value = self.value.newbyteorder(state[1])


class _Array:
    """An array that is filled after it is made."""

    value: np.ndarray | None = None


class _Name:
    """A name in a pickle: `make(machine, *args)` builds a value for it.

    Without `make` it is passed on as an argument and never called.
    """

    def __init__(self, full: str, make: Callable | None = None):
        self.full, self.make = full, make


# The values of the names.


def _dtype(machine, spec, *flags):
    return spec if isinstance(spec, _Dtype) else _Dtype(spec)


def _empty_array(machine, subtype, shape, typecode):
    return _Array()


def _scalar(machine, dtype, data):
    return machine.array(dtype, data, ())[()]


def _from_buffer(machine, data, dtype, shape, order="C"):
    return machine.array(dtype, data, shape, order == "F")


def _jax_array(machine, make, args, state, aval_state):
    return machine.filled(state)


def _encode(machine, text, encoding):
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise UnsafePickle(f"it encodes {_shown(text)} as {_shown(encoding)}")
    machine.take(len(text))
    return text.encode("latin1")


def _no_bytes(machine):
    """Makes empty bytes, as protocol 2 does."""
    return b""


def _ordered(machine, pairs=()):
    """Makes a dict, as protocols 0 and 1 do for an OrderedDict."""
    machine.take(_ENTRY * len(pairs))
    return machine.set_items({}, [x for key, value in pairs for x in (key, value)])


def _instance(machine, cls, base, state):
    """Makes an instance of a class, as protocols 0 and 1 do."""
    if not (isinstance(cls, _Name) and _is_trax(cls.full)):
        raise UnsafePickle(f"it makes an instance of {_shown(cls)}")
    return PickledObject(cls.full)


_ENTRY = 16  # bytes of an entry of a dict, at least
_BFLOAT16 = _Name("ml_dtypes.bfloat16")
_KNOWN: dict[str, Any] = {"ml_dtypes.bfloat16": _BFLOAT16}
_MAKERS = {
    "numpy.dtype": _dtype,
    "numpy.ndarray": None,
    "jax._src.array._reconstruct_array": _jax_array,
    "jax.array._reconstruct_array": _jax_array,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _ordered,
}
for _copyreg, _builtins in (("copyreg", "builtins"), ("copy_reg", "__builtin__")):
    _MAKERS |= {
        f"{_copyreg}._reconstructor": _instance,
        f"{_builtins}.object": None,
        f"{_builtins}.bytes": _no_bytes,
    }
for _package in ("numpy.core", "numpy._core"):  # before and since NumPy 2
    _MAKERS |= {
        f"{_package}.multiarray._reconstruct": _empty_array,
        f"{_package}.multiarray.scalar": _scalar,
        f"{_package}.numeric._frombuffer": _from_buffer,
    }
_KNOWN |= {full: _Name(full, make) for full, make in _MAKERS.items()}
_SCALARS = {"bool_", *(f"{k}int{n}" for k in ("", "u") for n in (8, 16, 32, 64))}
_SCALARS |= {"float16", "float32", "float64"}


def _named(full: str) -> Any:
    package, _, name = full.partition(".")
    if full in _KNOWN:
        return _KNOWN[full]
    if package == "numpy" and name in _SCALARS:
        return _Dtype(np.dtype(name).str)
    if _is_trax(full):
        return _Name(full, lambda machine, *args: PickledObject(full, args))
    full = " ".join(full[:80].split())
    raise UnsafePickle(f"it names {full}, which is neither an array nor a container")


def _is_trax(full: str) -> bool:
    return full.startswith("trax.")


def _shown(value: Any) -> str:
    """A value in a few words. The text of a nested one may be longer than any memory."""
    if isinstance(value, _Name | PickledObject):
        return value.full if isinstance(value, _Name) else value.name
    return repr(value[:60]) if isinstance(value, str | bytes) else f"a {type(value).__name__}"


class _Machine:
    """The stack machine. Its methods named like opcodes take the opcode's argument."""

    def __init__(self, data: bytes):
        self._data = data
        self._left = MAX_COPIES * len(data) + _SMALL
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value that the pickle builds."""
        for n, (opcode, argument, _) in enumerate(pickletools.genops(self._data)):
            if n == MAX_OPCODES:
                raise UnsafePickle(f"it has more than {MAX_OPCODES:,} opcodes")
            name = opcode.name
            if name == "STOP":
                return _finished(self._stack.pop())
            if name in _PUSHES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _OPCODES:
                _OPCODES[name](self, argument)
            elif name not in ("PROTO", "FRAME"):
                raise UnsafePickle(f"it needs the opcode {name}, which no checkpoint has")
        raise ValueError("it has no end")

    def take(self, n_bytes: int) -> None:
        """Counts bytes that are copied."""
        self._left -= n_bytes
        if self._left < 0:
            raise UnsafePickle("it copies more bytes than it has: it uses some many times")

    def array(self, dtype: Any, data: Any, shape: Any, is_fortran: bool = False) -> np.ndarray:
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

    def filled(self, state: Any) -> np.ndarray:
        """An array of the state that NumPy gives one."""
        _version, shape, dtype, is_fortran, data = state
        return self.array(dtype, data, shape, bool(is_fortran))

    def set_items(self, items: Any, pairs: list[Any]) -> dict[str, Any]:
        """Puts keys and values, in turns, into a dict."""
        if type(items) is not dict or len(pairs) % 2:
            raise UnsafePickle(f"it sets items of {_shown(items)}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str):  # the hash of another may take any time
                raise UnsafePickle(f"a key of a dict is {_shown(key)}: expected text")
            items[key] = value
        return items

    # Opcodes.

    def _mark(self, _):
        if len(self._marked) > MAX_DEPTH:
            raise UnsafePickle(f"it is nested deeper than {MAX_DEPTH} containers")
        self._marked.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        since, self._stack = self._stack, self._marked.pop()
        return since

    def _pop(self, _):
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _tuple(self, n: int) -> None:
        self._stack[-n:] = [tuple(self._stack[-n:])]

    def _make(self, kind: Callable[[list[Any]], Any]) -> None:
        """Makes a container of the values above the mark."""
        container = kind(self._since_mark())
        self._stack.append(container)

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise UnsafePickle(f"it appends to {_shown(self._stack[-1])}")
        self._stack[-1].extend(values)

    def _set_item(self, _):
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items(self._stack[-1], [key, value])

    def _set_since_mark(self, _):
        pairs = self._since_mark()
        self.set_items(self._stack[-1], pairs)

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise UnsafePickle("it uses a value that it has not stored")
        self._stack.append(self._memo[index])

    def _global(self, full: str | None) -> None:
        if full is None:
            name, module = self._stack.pop(), self._stack.pop()
            if not isinstance(name, str) or not isinstance(module, str):
                raise UnsafePickle("it names something that is no text")
            full = f"{module} {name}"
        self._stack.append(_named(full.replace(" ", ".", 1)))

    def _call(self, _):
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or function.make is None:
            raise UnsafePickle(f"it calls {_shown(function)}")
        if not isinstance(args, tuple):
            raise UnsafePickle(f"it calls {function.full} with {_shown(args)}")
        self.take(8 * len(args))
        self._stack.append(function.make(self, *args))

    def _build(self, _):
        state, instance = self._stack.pop(), self._stack[-1]
        if isinstance(instance, _Array) and instance.value is None:
            instance.value = self.filled(state)
        elif isinstance(instance, _Dtype):
            instance.set_state(state)
        elif isinstance(instance, PickledObject) and not instance.state:
            # A class with __slots__ has two states: its dict and its slots.
            for part in state if isinstance(state, tuple) else (state,):
                if isinstance(part, dict):
                    self.take(_ENTRY * len(part))
                    instance.state.update(part)
        else:
            raise UnsafePickle(f"it sets the state of {_shown(instance)}")


_PUSHES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "POP": _Machine._pop,
    "POP_MARK": lambda machine, _: machine._since_mark(),
    "DUP": lambda machine, _: machine._stack.append(machine._stack[-1]),
    "LIST": lambda machine, _: machine._make(list),
    "APPEND": lambda machine, _: machine._append([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "TUPLE": lambda machine, _: machine._make(tuple),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "DICT": lambda machine, _: machine._make(lambda pairs: machine.set_items({}, pairs)),
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_since_mark,
    "MEMOIZE": _Machine._put,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine._get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine._global),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine._call),
    "BUILD": _Machine._build,
}


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
        return _Machine(data).run()
    except UnsafePickle as error:
        raise UnsafePickle(f"{where} is refused: {error}") from None
    except Exception as error:  # bytes that are no pickle may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{where} is damaged or is no pickle ({reason}): copy it again") from None


def _finished(tree: Any) -> Any:
    """The tree with an array in place of each `_Array`."""
    # container -> it, its nodes and its height; None while it is not finished
    done: dict[int, tuple[Any, int, int] | None] = {}

    def all_of(nodes, depth: int) -> tuple[list[Any], int, int]:
        found, total, height = [], 1, 0
        for node in nodes:
            item, size, below = walk(node, depth + 1)
            found.append(item)
            total, height = total + size, max(height, below + 1)
            if total > MAX_OPCODES:
                raise UnsafePickle(f"it has more than {MAX_OPCODES:,} nodes, counting repetitions")
            if max(height, depth) > MAX_DEPTH:
                raise UnsafePickle(f"it is nested deeper than {MAX_DEPTH} containers")
        return found, total, height

    def walk(node, depth: int) -> tuple[Any, int, int]:
        if isinstance(node, _Array):
            if node.value is None:
                raise UnsafePickle("an array has no content")
            return node.value, 1, 0
        if isinstance(node, _Dtype):
            return node.value, 1, 0
        if isinstance(node, _Name):
            raise UnsafePickle("it holds a function or a class")
        if not isinstance(node, PickledObject | dict | list | tuple):
            return node, 1, 0
        key = id(node)
        if key in done:
            if (found := done[key]) is None:
                raise UnsafePickle("a container holds itself")
            return found
        done[key] = None
        if isinstance(node, PickledObject):
            (node.args, node.state), size, height = all_of((node.args, node.state), depth)
        elif isinstance(node, dict):
            values, size, height = all_of(node.values(), depth)
            node.update(zip(node, values, strict=True))
        else:
            values, size, height = all_of(node, depth)
            if isinstance(node, list):
                node[:] = values
            else:
                node = tuple(values)
        done[key] = found = node, size, height
        return found

    return walk(tree, 0)[0]
