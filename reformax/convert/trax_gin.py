"""The model that a gin file of Trax describes, read as data: Trax and gin run nothing of it.

`read` takes Trax's published configs and the config.gin of a run of Trax. Defaults that a config
leaves out are those of Trax 1.4.1. An argument that changes the function and has no counterpart
is refused by name; what belongs to training alone is named in a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reformax.cli import config, trax_config
from reformax.cli.statements import Statements, WrittenName, read_file
from reformax.convert.spec import Op, Spec
from reformax.data import files
from reformax.declared import shown
from reformax.ops.hashing.circle import SELF_SCORE

CONFIG = "config.gin"
WEIGHTS = ("model.pkl.gz", "model.pkl")

# Arguments of the same name and meaning, with Trax's defaults.
_SAME = {
    "ReformerLM": {
        "d_model": 512,
        "d_ff": 2048,
        "d_attention_key": 64,
        "d_attention_value": 64,
        "n_layers": 6,
        "n_heads": 8,
        "dropout": 0.1,
        "ff_chunk_size": 0,
    },
    "TransformerLM": {"d_model": 512, "d_ff": 2048, "n_layers": 6, "n_heads": 8, "dropout": 0.1},
}
# Arguments with rows of their own below.
_READ = {
    "ReformerLM": {
        "vocab_size",
        "max_len",
        "pos_type",
        "pos_axial_shape",
        "pos_d_axial_embs",
        "attention_type",
        "ff_activation",
    },
    "TransformerLM": {"vocab_size", "max_len", "ff_activation"},
}
# The one value of an argument whose others compute a function that no model of reformax has.
_ONLY = {
    "ff_use_sru": 0,
    "ff_sparsity": 0,
    "loss_sparsity": 0,
    "loss_d_lowrank": 0,
    "attention_chunk_size": 0,
    "bias": False,
}
# Arguments of training or of how Trax computes; the model's function does not depend on them.
_TRAINING = {
    "mode",
    "pos_start_from_zero_prob",
    "pos_max_offset_to_add",
    "dropout_shared_axes",
    "loss_sparsity_type",
    "loss_sparsity_prob",
}
# The same of attention. Trax's models give the first six themselves.
_COMPUTING = {
    "n_heads",
    "d_qk",
    "d_v",
    "causal",
    "masked",
    "mode",
    "attention_dropout",
    "output_dropout",
    "n_parallel_heads",
    "use_python_loop",
    "use_reference_code",
    "predict_mem_len",
    "predict_drop_len",
    "max_length_for_buckets",
}
_ACTIVATIONS = {"Relu": "relu", "Gelu": "gelu", "FastGelu": "gelu_tanh", "Swish": "silu"}
_POSITIONS = {"sin-cos": "sinusoidal", "no": "none"}


class Read(NamedTuple):
    """A model of Trax's, and what its config says besides."""

    spec: Spec
    notes: list[str]


def is_config(path: Path) -> bool:
    """Whether a file is a config of Trax."""
    return path.is_file() and trax_config.is_trax(_statements(path))


def weights_of(folder: Path) -> Path | None:
    """The weights of a run of Trax; None if the folder is none.

    Raises:
      FileNotFoundError: it has a config of Trax and no weights, or weights and no config.
    """
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not found and not is_config(folder / CONFIG):
        return None
    for missing, what in ((not found, WEIGHTS[0]), (not (folder / CONFIG).is_file(), CONFIG)):
        if missing:
            raise FileNotFoundError(
                f"{folder} is a run of Trax's and has no {what}: copy it from where it was trained"
            )
    return found[0]


def read(path: Path, vocab_size: int | None = None) -> Read:
    """The model of a config of Trax.

    Args:
      path: the config.
      vocab_size: of the weights, where the config leaves it to the trainer's data.

    Raises:
      ValueError: the model, or an argument of it, has no counterpart; the line names it.
    """
    statements, where = _statements(path), str(path)
    if statements.includes:
        raise ValueError(
            f"{where} includes {shown(statements.includes[0])}, which is not read: put its lines "
            "there in its place"
        )
    name = trax_config.model_of(statements)
    if name in trax_config.MODELS and name not in _SAME:
        counterpart = trax_config.MODELS[name]
        raise ValueError(
            f"{where} has Trax's {name}, whose logits have a matrix of their own; here they are "
            f"products with the embedding, so only weights of {' and '.join(_SAME)} are read: "
            f"train {counterpart.model} with --config_file={counterpart.config}"
        )
    if name not in _SAME:
        raise ValueError(f"{where} has the model {name}: expected {' or '.join(_SAME)}")
    bound = _Bound(statements.values, where)
    arguments = _arguments(bound, name, vocab_size)
    arguments["attention_dropout"] = arguments["dropout"]  # Trax's models give attention theirs
    attention = [Op("dense", {})]
    if name == "ReformerLM":
        attention = _cycle(bound, arguments["n_layers"])
    else:
        size = arguments["d_model"] // arguments["n_heads"]
        arguments |= {"attention_bias": True, "d_attention_key": size, "d_attention_value": size}
    spec = Spec.make(name, attention, **arguments)
    spec.build()  # checks the arguments
    return Read(spec, bound.notes())


def _statements(path: Path) -> Statements:
    if (size := files.check_ordinary(path)) > config.MOST:
        raise ValueError(f"{path} has {size:,} bytes: expected at most {config.MOST:,}")
    return read_file(path)


class _Bound:
    """The settings of a config, by function and argument; notes which of them were read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where, self._used = values, where, set()

    def of(self, reference: str) -> dict[str, Any]:
        """The arguments of a function, those of its scope last; all of them count as read."""
        scope, _, selector = reference.lstrip("@").removesuffix("()").rpartition("/")
        function, found, scoped = selector.rpartition(".")[2], {}, {}
        for setting, value in self._values.items():
            its_function, argument = trax_config.last(setting)
            its_scope = setting.rpartition("/")[0]
            if its_function == function and "." in setting and its_scope in ("", scope):
                (scoped if its_scope else found)[argument] = self.value(value)
                self._used.add(setting)
        return found | scoped

    def value(self, value: Any) -> Any:
        """A value with macros replaced."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.value, value))
        found = trax_config.resolved(self._values, value)
        if found is not value:
            return self.value(found)
        if isinstance(value, WrittenName) and value.startswith("%"):
            raise ValueError(f"{self.where} uses {value}, which it does not set")
        return value

    def refuse_others(self, function: str, given: Mapping[str, Any], known: set[str]) -> None:
        """Raises `ValueError` for the first argument that has no counterpart."""
        for name, value in given.items():
            if name in _ONLY and value in (_ONLY[name], None):
                continue
            if name not in known:
                wanted = f"expected {_ONLY[name]}" if name in _ONLY else "it is unknown"
                raise ValueError(
                    f"{self.where}: {function}.{name} is {shown(value)}, which has no counterpart "
                    f"in reformax: {wanted}"
                )

    def notes(self) -> list[str]:
        """A line that names the settings that were not read."""
        left = [name for name in self._values if "." in name and name not in self._used]
        left = [n for n in left if not n.endswith("macro.value")]
        ignored = [n for n in self._used if trax_config.last(n)[1] in _NOTED]
        names = sorted(left) + sorted(ignored)
        if not names:
            return []
        return [f"of {self.where} these settings of training are left out: {', '.join(names)}"]


# Arguments that change training alone, or that reformax computes in another way.
_NOTED = {
    "attention_dropout",
    "output_dropout",
    "dropout_shared_axes",
    "pos_start_from_zero_prob",
    "pos_max_offset_to_add",
}


def _arguments(bound: _Bound, name: str, vocab_size: int | None) -> dict[str, Any]:
    """The arguments of a model besides its attention."""
    given, same = bound.of(name), _SAME[name]
    bound.refuse_others(name, given, same.keys() | _READ[name] | _TRAINING)
    found = {argument: given.get(argument, default) for argument, default in same.items()}
    found["vocab_size"] = given.get("vocab_size") or vocab_size
    if found["vocab_size"] is None:
        raise ValueError(f"{bound.where} does not set {name}.vocab_size, and no weights say it")
    activation = str(given.get("ff_activation", "Relu" if name == "TransformerLM" else "FastGelu"))
    short = trax_config.function_of(activation)
    if short not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(
            f"{bound.where}: {name}.ff_activation is {activation}, which has no counterpart in "
            f"reformax: expected one of {known}"
        )
    return found | {"ff_activation": _ACTIVATIONS[short]} | _positions(bound, name, given)


def _positions(bound: _Bound, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Positions: Trax's table of `max_len`, axial ones, sinusoidal ones or none."""
    kind, shape = given.get("pos_type"), tuple(given.get("pos_axial_shape") or ())
    # Configs from before `pos_type` have a shape alone.
    if not kind and not (shape and given.get("pos_d_axial_embs")):
        size = given.get("d_model", _SAME[name]["d_model"])
        table = {"pos_axial_shape": (given.get("max_len", 2048),), "pos_d_axial_embs": (size,)}
        return {"pos_type": "axial", **table}
    if kind in _POSITIONS:
        return {"pos_type": _POSITIONS[kind]}
    if kind in ("fixed-base", "infinite", "infinite-affine", "time-bin"):
        raise ValueError(
            f"{bound.where}: {name}.pos_type is {kind!r}, which has no counterpart in "
            "reformax: expected None, 'sin-cos', 'no' or 'axial'"
        )
    d_embs = tuple(given.get("pos_d_axial_embs") or ())
    return {"pos_type": "axial", "pos_axial_shape": shape, "pos_d_axial_embs": d_embs}


def _cycle(bound: _Bound, n_layers: int) -> list[Op]:
    """The attention of the layers that repeat."""
    given = bound.of("ReformerLM").get("attention_type", "@SelfAttention")
    cycle = list(given) if isinstance(given, list | tuple) else [given]
    if not cycle or n_layers % len(cycle):
        raise ValueError(
            f"{bound.where}: ReformerLM.n_layers is {n_layers} and attention_type has "
            f"{len(cycle)} entries: expected a multiple of them"
        )
    return [_op(bound, str(reference)) for reference in cycle]


def _op(bound: _Bound, reference: str) -> Op:
    name = trax_config.function_of(reference)
    if name not in ("SelfAttention", "LSHSelfAttention"):
        raise ValueError(
            f"{bound.where}: the attention {reference} has no counterpart in reformax: expected "
            "SelfAttention or LSHSelfAttention"
        )
    given = bound.of(reference)
    lsh = name == "LSHSelfAttention"
    chunks = {"chunk_len": 128 if lsh else None, "n_chunks_before": int(lsh), "n_chunks_after": 0}
    of_lsh = {"n_hashes", "n_buckets"} if lsh else set()
    bound.refuse_others(name, given, _COMPUTING | chunks.keys() | {"share_qk"} | of_lsh)
    options = {key: given.get(key, default) for key, default in chunks.items()}
    shares = given.get("share_qk", False)
    if lsh:
        n_buckets = given.get("n_buckets")
        n_buckets = "auto" if n_buckets is None else n_buckets
        options["n_buckets"] = tuple(n_buckets) if isinstance(n_buckets, list) else n_buckets
        options["n_hashes"] = given.get("n_hashes", 1)
        circle = {"count_once": False, "wrap": True, "self_score": SELF_SCORE}
        return Op("lsh", options | circle | {"pad_chunks": 1})
    if options["chunk_len"] is None:
        return Op("shared_qk", {"attend_self_if_alone": True}) if shares else Op("dense", {})
    options |= {"shared_qk": bool(shares), "window": None, "pad_chunks": 1}
    if options["n_chunks_before"] > 1 or options["n_chunks_after"] > 0:
        options |= {"wrap": True} | ({"self_score": SELF_SCORE} if shares else {})
    return Op("local", options)
