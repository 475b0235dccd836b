"""Trax, imported quickly and with or without TensorFlow.

Trax is an extra of the package, for it requires TensorFlow to be installed. Without it layers are
their pure functions alone.

Trax 1.4.1 loads in 13 s and only where TensorFlow is installed, though its layers and models need
TensorFlow only for files and two `isinstance` checks. No other module imports Trax. This one hides
what Python warns of as it compiles Trax's sources, and makes three changes inside Trax's modules.
`sys.modules` never holds a stand-in, so the rest of the program sees the TensorFlow that is
installed, or none:

  * where a module of Trax says `import tensorflow`, it gets an object that imports TensorFlow at
    its first use, and that does Trax's file handling where TensorFlow is not installed;
  * `trax.foo` loads the submodule `foo` at its first use, rather than all of them with the package;
  * `trax.layers.assert_shape` notes where a layer was defined without reading source files.

A `trax` that was imported before this module is used as it is.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
import warnings
from typing import Any


class NotInstalled(ModuleNotFoundError):
    """A module that a use of Trax needs."""

    def __init__(self, module: str, user: str):
        package = "'reformax[trax]'" if module == "trax" else module.replace("_", "-")
        install = f"pip install {package}"
        super().__init__(f"{user} needs {module}, which is not installed: {install}", name=module)


class _Never:
    """A class without instances, for `isinstance(x, tf.TensorShape)` before TensorFlow loads."""


class _LocalFiles:
    """`tf.io` as far as Trax's `save_to_file` and `init_from_file` use it, on local paths."""

    class gfile:
        GFile = staticmethod(open)
        exists = staticmethod(os.path.exists)

        @staticmethod
        def rename(source: str, target: str, overwrite: bool = False) -> None:
            if not overwrite and os.path.exists(target):
                raise FileExistsError(f"{target} exists; pass overwrite=True to replace it")
            os.replace(source, target)


class _Lazy(types.ModuleType):
    """Replaces, in Trax's modules, a module that takes seconds to import; loads it at first use."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # an inspection, which needs nothing of the module
            raise AttributeError(f"{self.__name__} is not loaded; no attribute {attribute!r}")
        try:
            return getattr(importlib.import_module(self.__name__), attribute)
        except ModuleNotFoundError as error:
            user = f"Trax's use of {self.__name__}.{attribute}"
            raise NotInstalled(error.name or self.__name__, user) from None


class _LazyTensorFlow(_Lazy):
    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("TensorShape", "DType"):
            # Trax checks every shape for it. Without TensorFlow no shape is one.
            return getattr(sys.modules.get("tensorflow"), attribute, _Never)
        try:
            return super().__getattr__(attribute)
        except NotInstalled as error:
            if (attribute, error.name) == ("io", "tensorflow"):
                return _LocalFiles
            raise


class _Absent(types.ModuleType):
    """Replaces Trax, or a part of it, where it is not installed; a use says how to install it."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"{self.__name__} is not installed; no attribute {attribute!r}")
        raise NotInstalled("trax", f"{self.__name__}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotInstalled("trax", self.__name__)


class _LazyBackend(dict):
    """Trax's table of TensorFlow operations, filled when `trax.fastmath` is set to use them."""

    def __missing__(self, key: str) -> Any:
        backend = importlib.import_module("trax.fastmath.tf").TF_BACKEND
        if key not in backend:
            raise KeyError(key)
        self.update(backend)
        return self[key]


_TENSORFLOW = _LazyTensorFlow("tensorflow")
_TENSORFLOW.compat = _Lazy("tensorflow.compat")
_TENSORFLOW.compat.v2 = _TENSORFLOW
_STAND_INS = {
    "tensorflow": _TENSORFLOW,
    "tensorflow.compat.v2": _TENSORFLOW,
    "tensorflow_datasets": _Lazy("tensorflow_datasets"),
}
_FASTMATH_TF = types.SimpleNamespace(TF_BACKEND=_LazyBackend())


def _import(name, globals=None, locals=None, fromlist=(), level=0):
    """`import` as the modules of Trax see it."""
    if level == 0 and name in _STAND_INS and not fromlist:
        return _STAND_INS[name]
    if name == "trax.fastmath.tf" and fromlist == ("TF_BACKEND",):
        return _FASTMATH_TF
    try:
        return builtins.__import__(name, globals, locals, fromlist, level)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if isinstance(error, NotInstalled) or not module.startswith("tensorflow"):
            raise
        raise NotInstalled(module, globals["__name__"]) from None


class _Package(types.ModuleType):
    """The package `trax`, whose `__init__` runs only for a name that is not a submodule's."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"module 'trax' has no attribute {attribute!r}")
        submodule = f"trax.{attribute}"
        try:
            return importlib.import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise
        self.__class__ = types.ModuleType  # an ordinary module, while it runs and afterwards
        try:
            importlib.machinery.SourceFileLoader.exec_module(self.__loader__, self)
        except BaseException:
            self.__class__ = _Package
            raise
        return getattr(self, attribute)


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **options):
        """Compiles a source of Trax, whose `is ()` Python would warn a user of."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().source_to_code(data, path, **options)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__builtins__ = {**vars(builtins), "__import__": _import}
        if module.__name__ == "trax":
            module.__class__ = _Package
            return
        super().exec_module(module)
        if module.__name__ == "trax.layers.assert_shape":
            # inspect.stack() reads the source of every frame, at every use of the decorator.
            module.inspect = types.SimpleNamespace(
                isclass=inspect.isclass,
                stack=lambda: [(sys._getframe(1),), (sys._getframe(2),)],
                getframeinfo=lambda frame: types.SimpleNamespace(
                    filename=frame.f_code.co_filename, lineno=frame.f_lineno
                ),
            )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "trax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if "trax" not in sys.modules:
    sys.meta_path.insert(0, _Finder())

try:
    import trax
    from trax import layers as tl
    from trax.shapes import ShapeDtype, signature
except ModuleNotFoundError as error:
    if error.name != "trax":
        raise
    HAS_TRAX = False
    trax, tl = _Absent("trax"), _Absent("reformax.layers.tl")
    ShapeDtype = signature = _Absent("trax.shapes")
else:
    HAS_TRAX = True
