"""A model of this package as plain values, which converters read, build and write."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from reformax import ops
from reformax.cli import parsed
from reformax.declared import shown
from reformax.models import designs, encoder, lm
from reformax.models.designs import SHORTHANDS
from reformax.ops import AttentionOp, dense, flash, gated_delta, local, lsh, shared_qk
from reformax.training import loop

T = TypeVar("T")
MODELS = {
    model.__name__: model
    for model in (lm.ReformerLM, lm.TransformerLM, encoder.TransformerMaskedLM)
}
OPS = {
    "dense": dense.dense,
    "flash": flash.flash,
    "gated_delta": gated_delta.gated_delta,
    "local": local.local,
    "lsh": lsh.lsh,
    "shared_qk": shared_qk.shared_qk,
}
# Those that see all keys, in two orders of computing.
DENSE = ("dense", "flash")
# Options of logits and of their softmax that no other package's layers have.
_PLAIN = {"soft_cap": None, "scale_by_length": None, "scale": None, "learned_sinks": False}

# What may take the place of dense layers, and no other package's models have.
REPLACEMENTS = (
    *("asymmetric_lsh", "dsa", "hash_sparse", "memory_efficient", "moba", "sinks", "smyrf"),
)
OPS |= {name: getattr(getattr(ops, name), name) for name in REPLACEMENTS}

# (whether it holds, what the model has, what is expected): raises where a format has no such model
Require = Callable[[bool, str, str], None]


class Op(NamedTuple):
    """One attention of the cycle: a name in `OPS`, and the options that are set."""

    name: str
    options: Mapping[str, Any]

    def option(self, name: str) -> Any:
        """The value of an option, or its default."""
        default = inspect.signature(OPS[self.name]).parameters[name].default
        return self.options.get(name, default)

    @property
    def algorithm(self) -> AttentionOp:
        """The op; raises `SettingError` for an option that is out of range."""
        return OPS[self.name](**self.options)

    def require(self, require: Require, **wanted: Any) -> None:
        """Calls `require` for each option that must have a value."""
        for name, value in wanted.items():
            found = self.option(name)
            require(found == value, f"{self.name}'s {name} is {found!r}", repr(value))

    def require_plain(self, require: Require, **wanted: Any) -> None:
        """`require`, and also that the logits and their softmax are as in other packages."""
        known = inspect.signature(OPS[self.name]).parameters
        plain = {name: value for name, value in _PLAIN.items() if name in known}
        self.require(require, **plain, **wanted)


class Spec(NamedTuple):
    """A model, the cycle of its attentions, and its other arguments, defaults included.

    The design has names of activations. Its `SHORTHANDS` are among the arguments too.
    """

    model: str
    attention: tuple[Op, ...]
    arguments: Mapping[str, Any]
    design: designs.Design = designs.Design()

    @classmethod
    def make(cls, model: str, attention, **arguments) -> Spec:
        """A spec with the model's defaults for arguments that are not given."""
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(MODELS[model]).parameters.items()
            if name not in ("attention_type", "mode")
        }
        unknown = set(arguments) - set(defaults)
        if unknown:
            raise ValueError(f"{model} has no argument {', '.join(sorted(unknown))}")
        arguments = defaults | arguments
        arguments["ff_activation"] = _activation_name(arguments["ff_activation"])
        design = _design(arguments.pop("design")).but(
            **{name: arguments[name] for name in SHORTHANDS}
        )
        arguments |= {name: getattr(design, name) for name in SHORTHANDS}
        return cls(model, tuple(attention), arguments, design)

    @classmethod
    def of_config(cls) -> Spec:
        """The spec of the model that the parsed config trains.

        Raises:
          ValueError: the model or one of its attentions is not in `MODELS` or `OPS`, or an argument
            is not what it may be.
        """
        described = parsed.described(loop.train, "model")
        if not isinstance(described, parsed.Reference):
            raise ValueError(f"the config's model is {shown(described)}: expected {_names(MODELS)}")
        model, arguments = described
        if MODELS.get(model.__name__) is not model:
            raise ValueError(f"the config's model is {model.__name__}: expected {_names(MODELS)}")
        cycle = arguments.pop("attention_type", None)
        if cycle is None:
            default = model.attention_type
            ops = [default] if isinstance(default, AttentionOp) else default
            cycle = [parsed.Reference(OPS[op.name], {}) for op in ops]
        attention = []
        one = isinstance(cycle, parsed.Reference) or not isinstance(cycle, list | tuple)
        for op in [cycle] if one else cycle:
            if not isinstance(op, parsed.Reference):
                raise ValueError(f"the config's attention is {shown(op)}: expected {_names(OPS)}")
            name = op.function.__name__
            if OPS.get(name) is not op.function:
                raise ValueError(f"the config's attention is {name}: expected {_names(OPS)}")
            attention.append(Op(name, _changed(op.function, op.arguments)))
        arguments.pop("mode", None)
        spec = cls.make(model.__name__, attention, **arguments)
        spec.build()  # checks the arguments
        return spec._replace(arguments=_with_sizes(spec.arguments))

    @property
    def module(self) -> str:
        """The module of the model, in `reformax.models`."""
        return MODELS[self.model].__module__.rpartition(".")[2]

    @property
    def rotating(self) -> list[bool]:
        """Whether each layer of the cycle rotates queries and keys."""
        ops = [op.algorithm for op in self.attention]
        return self.design.rotating(self.arguments["pos_type"], "attention_type", ops)

    def layers(self):
        """Yields `(layer, block, repeat, op)`; a layer's weights are at its block and repeat."""
        for layer in range(self.arguments["n_layers"]):
            repeat, block = divmod(layer, len(self.attention))
            yield layer, block, repeat, self.attention[block]

    def build(self, mode: str = "eval", **op_options):
        """Makes the model.

        Args:
          mode: "train" or "eval".
          **op_options: further options of LSH attention, such as `rotations`.
        """
        ops = []
        for op in self.attention:
            extra = op_options if op.name == "lsh" else {}
            ops.append(Op(op.name, {**op.options, **extra}).algorithm)
        given = {**self.arguments, "design": self.design}
        return MODELS[self.model](**given, attention_type=tuple(ops), mode=mode)

    def require(self, require: Require, **wanted: Any) -> None:
        """Calls `require` for each argument that must have a value."""
        for name, value in wanted.items():
            found = self.arguments[name]
            require(found == value, f"{name} is {found!r}", repr(value))

    def require_plain(self, require: Require) -> None:
        """Calls `require` for each choice of the design that only the decoders of today have."""
        for name, value in vars(designs.Design()).items():
            found = getattr(self.design, name)
            if name not in SHORTHANDS:
                require(found == value, f"{name} is {found!r}", repr(value))

    def require_dense(self, require: Require) -> None:
        """Calls `require` for each attention, which must be dense without options."""
        for op in self.attention:
            require(op.name in DENSE, f"the attention is {op.name}", "dense or flash")
            op.require_plain(require)

    def gin(self) -> str:
        """The spec as lines of a gin file, imports included."""
        alike = {name: [op.options for op in self.attention if op.name == name] for name in OPS}
        scoped = any(options != found[0] for found in alike.values() for options in found)
        used = dict.fromkeys(op.name for op in self.attention)
        lines = [f"from reformax.ops import {name}" for name in sorted(used)]
        choices = {
            name: value
            for name, value in vars(self.design).items()
            if name not in SHORTHANDS and value != getattr(designs.Design(), name)
        }
        if choices:
            lines = ["from reformax.models import designs", *lines]
        lines = [f"from reformax.models import {self.module}", *lines, ""]
        cycle, settings, imports = [], {}, set()
        for i, op in enumerate(self.attention):
            scope = f"layer_{i}/" if scoped else ""
            call = f"{scope}{op.name}.{op.name}"
            cycle.append(f"@{call}()")
            for option, value in op.options.items():
                settings |= _settings(f"{call}.{option}", value, scope, imports)
        prefix = f"{self.module}.{self.model}"
        lines.append(f"{prefix}.attention_type = ({', '.join(cycle)},)")
        settings |= {f"{prefix}.{name}": repr(value) for name, value in self.arguments.items()}
        if choices:
            lines.append(f"{prefix}.design = @designs.Design()")
            settings |= {f"designs.Design.{name}": repr(value) for name, value in choices.items()}
        lines += [f"{name} = {value}" for name, value in settings.items()]
        return "\n".join([*sorted(imports), *lines]) + "\n"

    def shapes(self) -> Any:
        """The shapes of the weights."""
        init = self.build().init_params
        return jax.eval_shape(lambda key: init(key, (1, 1)), jax.random.key(0))

    def max_length(self) -> int | None:
        """The longest sequence that the positions hold; None if there is no bound."""
        shape = self.arguments["pos_axial_shape"]
        return math.prod(shape) if shape else None


def cycle_of(layers: Sequence[T]) -> Sequence[T]:
    """The shortest cycle that layers repeat."""
    n = len(layers)
    return next(layers[:i] for i in range(1, n + 1) if layers == layers[:i] * (n // i))


def _with_sizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the sizes of heads, which other formats have as numbers."""
    size = arguments["d_model"] // arguments["n_heads"]
    names = "d_attention_key", "d_attention_value"
    return {**arguments, **{name: size for name in names if arguments[name] is None}}


def _design(given: Any) -> designs.Design:
    """A design, given by itself or as a config's reference, with its activation's name."""
    if isinstance(given, parsed.Reference):
        values = dict(given.arguments)
        if "ff_activation" in values:
            values["ff_activation"] = _activation_name(values["ff_activation"])
        given = given.function(**values)
    values = vars(given) | {"ff_activation": _activation_name(given.ff_activation)}
    return designs.Design(**values)


def _activation_name(given: Any) -> Any:
    """The name of an activation that is given as a function, or as a config's reference to one."""
    plain = isinstance(given, parsed.Reference) and not given.arguments
    function = given.function if plain else given
    if isinstance(function, str | None):
        return function
    for name, known in designs.ACTIVATIONS.items():
        if function is known:
            return name
    what = getattr(function, "__name__", None) or shown(function)
    raise ValueError(f"ff_activation is {what}: expected one of {_names(designs.ACTIVATIONS)}")


def _changed(function: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from their defaults: a run's config.gin holds the others too."""
    parameters = inspect.signature(function).parameters
    made = {name: _made(value) for name, value in options.items()}
    return {name: value for name, value in made.items() if value != parameters[name].default}


def _made(value: Any) -> Any:
    """A value of a config, with the objects that references in it name."""
    if not isinstance(value, parsed.Reference):
        return value
    return value.function(**{name: _made(x) for name, x in value.arguments.items()})


def _settings(name: str, value: Any, scope: str, imports: set[str]) -> dict[str, str]:
    """The lines of a gin file that give an option its value, by their names.

    Args:
      name: the option's.
      value: data, or a dataclass of data and further ones.
      scope: of the dataclasses' own settings.
      imports: gets the lines that these need.
    """
    if not dataclasses.is_dataclass(value):
        return {name: repr(value)}
    package, _, module = type(value).__module__.rpartition(".")
    imports.add(f"from {package} import {module}")
    call = f"{scope}{module}.{type(value).__name__}"
    found = {name: f"@{call}()"}
    for field in dataclasses.fields(value):
        if (given := getattr(value, field.name)) != field.default:
            found |= _settings(f"{call}.{field.name}", given, scope, imports)
    return found


def _names(table: Mapping[str, Any]) -> str:
    return ", ".join(table)
