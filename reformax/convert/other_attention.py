"""Puts another attention in the place of dense layers, with their weights and without training.

Separate queries and keys keep their projections: `asymmetric_lsh`, `moba` and others without
weights of their own attend to some of the keys that a dense layer attends to. So does `dsa`, whose
indexer is drawn: it scores keys by a random projection of the heads' products. Algorithms that
share queries and keys, such as `lsh`, get the mean of both projections, a beginning for training
alone. `dense` and `flash` go back into the place of all but the last.

The bits that this costs are measured on a text: of each layer alone, of all of them, and by the
number of hashes or of blocks. The caches of decoding are measured too.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reformax import memory
from reformax.convert.spec import DENSE, OPS, REPLACEMENTS, Op, Spec, cycle_of
from reformax.data import files
from reformax.data.pieces import PieceVocabulary
from reformax.data.stdlib import library_files
from reformax.declared import SettingError, shown
from reformax.layers.layer_norm import norm_places
from reformax.ops.numerics.rotary import RotaryAngles
from reformax.training.named_tensors import named
from reformax.training.step import jit_once

_CANDIDATES = ("local", "lsh", "shared_qk", *REPLACEMENTS, *DENSE)
# Algorithms whose weights of their own are worth something as they are drawn.
_DRAWN = ("dsa",)
TOKENS = 4096  # that bits are measured on
LENGTH = 1024  # of their rows, at most
# Options that say how many keys a query sees, and the values to measure: of hashes or of blocks,
# and of the algorithm whose option counts keys.
_BUDGETS = {"n_hashes": (1, 2, 4, 8), "top_k": (1, 2, 4, 8)}
_BUDGETS_OF = {"dsa": {"top_k": (64, 256, 1024)}}
# Options of a dense layer that do not say what it computes.
_OF_TILES = {"impl", "query_block_size", "key_block_size"}
_BYTES = 16  # of text that surely hold a token
_LANGUAGE_MODELS = ("ReformerLM", "TransformerLM")


def op_of(text: str) -> Op:
    """The algorithm of a text such as `moba` or `asymmetric_lsh(n_hashes=8)`.

    Raises:
      SettingError: there is no such algorithm or option, or a value is out of range.
    """
    refusal = SettingError(
        f"--attention={text}: expected a name and options, such as 'asymmetric_lsh(n_hashes=8)'"
    )
    try:
        node = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args
        options = {item.arg: ast.literal_eval(item.value) for item in node.keywords}
        assert None not in options and len(options) == len(node.keywords)  # `**`, or one twice
    except (SyntaxError, TypeError, ValueError, AssertionError):
        raise refusal from None
    name = node.func.id
    if name not in _CANDIDATES:
        names = ", ".join(_CANDIDATES)
        raise SettingError(f"--attention={text}: expected one of {names}, with options if any")
    parameters = inspect.signature(OPS[name]).parameters
    for option in options:
        if option not in parameters:
            raise SettingError(
                f"--attention={text}: {name} has no option {option}, only {', '.join(parameters)}"
            )
    op = Op(name, options)
    _ = op.algorithm  # checks the values
    return op


def layers_of(text: str | None, spec: Spec, op: Op) -> list[int]:
    """The numbers of layers, such as [0, 2, 3, 4] of `0,2-4`; None: all that `op` may take.

    Those are dense layers, and for a dense `op` the others that have all of their weights.

    Raises:
      SettingError: there is no such layer, or the algorithm cannot take its place.
    """
    ops = [op for *_, op in spec.layers()]
    back = op.name in DENSE
    replaceable = REPLACEMENTS if back else DENSE
    dense = [i for i, op in enumerate(ops) if op.name in replaceable]
    expected = " or ".join(replaceable)
    if text is None:
        if not dense:
            names = ", ".join(dict.fromkeys(op.name for op in ops))
            wanted = f"layers of {expected}" if back else "dense layers"
            raise SettingError(
                f"--attention={op.name} needs {wanted}, and the model has {names}: give another "
                "model"
            )
        return dense
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise SettingError(f"--layers={text}: expected numbers and ranges, such as 0,2-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= len(ops):
            raise SettingError(f"--layers={text}: the model has layers 0 to {len(ops) - 1}")
        if first > last:
            raise SettingError(f"--layers={text}: expected {last}-{first} instead of {part}")
        found |= set(range(first, last + 1))
    for layer in sorted(found):
        if layer not in dense:
            raise SettingError(
                f"--layers={text}: layer {layer} is {ops[layer].name}, expected {expected}"
            )
    return sorted(found)


def replaced(spec: Spec, params: Any, op: Op, layers: Sequence[int]) -> tuple[Spec, Any]:
    """The model with another attention in some layers, and its weights.

    Raises:
      SettingError: the algorithm has weights of its own, needs as many heads of keys as of queries,
        computes no such logits, or rotates queries and keys by other angles.
    """
    shares = op.algorithm.shared_qk
    n_heads, n_kv_heads = spec.arguments["n_heads"], spec.arguments["n_kv_heads"]
    if shares and n_kv_heads not in (None, n_heads):
        raise SettingError(
            f"--attention={op.name} shares queries and keys, and the model has {n_kv_heads} heads "
            f"of keys for {n_heads} of queries: take asymmetric_lsh"
        )
    old_ops = [old for *_, old in spec.layers()]
    ops = [_like(old, op) if i in layers else old for i, old in enumerate(old_ops)]
    rotating = spec.design.rotary_layers or [True] * len(spec.attention)
    places = norm_places(spec.design.norm_place, len(spec.attention))
    kinds = [
        (op, rotating[block], places[block])
        for op, (_, block, *_) in zip(ops, spec.layers(), strict=True)
    ]
    period = len(cycle_of(kinds))
    new = spec._replace(attention=tuple(ops[:period]))
    if spec.design.rotary_layers:
        rotary_layers = tuple(rotates for _, rotates, _ in kinds[:period])
        new = new._replace(design=new.design.but(rotary_layers=rotary_layers))
    if not isinstance(spec.design.norm_place, str):
        norm_place = tuple(place for *_, place in kinds[:period])
        new = new._replace(design=new.design.but(norm_place=norm_place))
    for layer in layers:
        if _angles(spec, layer) != _angles(new, layer):
            raise SettingError(
                f"--attention={op.name}: layers that see a window have rotary positions of their "
                f"own in this model, by which layer {layer} was not trained: take sinks"
            )
    by_layer = [
        jax.tree.map(lambda x, at=repeat: x[at], params["stack"][f"block_{block}"])
        for _, block, repeat, _ in spec.layers()
    ]
    if shares:
        for layer in layers:
            by_layer[layer] = _sharing(by_layer[layer])
    if any(x.name in _DRAWN for x in (op, *(old_ops[layer] for layer in layers))):
        for layer, drawn in _drawn(new, layers).items():
            attention = by_layer[layer]["attention"]
            weights = drawn  # `()` where the algorithm has no weights
            if isinstance(drawn, dict) and isinstance(attention["op"], dict):
                weights = drawn | {name: x for name, x in attention["op"].items() if name in drawn}
            by_layer[layer] = {**by_layer[layer], "attention": {**attention, "op": weights}}
    stack = {
        f"block_{i}": jax.tree.map(lambda *x: jnp.stack(x), *by_layer[i::period])
        for i in range(period)
    }
    changed = params | {"stack": stack}
    _check_weights(new, changed, op)
    return new, changed


def _drawn(spec: Spec, layers: Sequence[int]) -> dict[int, Any]:
    """The fresh weights of the algorithms of some layers."""
    model = spec.build()
    at = {layer: (block, repeat) for layer, block, repeat, _ in spec.layers() if layer in layers}

    def of_layers(key) -> dict[int, Any]:
        stack = model.init_params(key, (1, 1))["stack"]
        of_block = {block: stack[f"block_{block}"]["attention"]["op"] for block, _ in at.values()}
        return {
            layer: jax.tree.map(lambda x, at=repeat: x[at], of_block[block])
            for layer, (block, repeat) in at.items()
        }

    return jax.jit(of_layers)(jax.random.key(0))  # compiled, so that no other weight is drawn


def _angles(spec: Spec, layer: int) -> RotaryAngles | None:
    """The rotary positions of a layer; None: it has none."""
    block = layer % len(spec.attention)
    algorithm = spec.attention[block].algorithm
    return spec.design.rotary_of(algorithm) if spec.rotating[block] else None


def _like(old: Op, op: Op) -> Op:
    """The new algorithm with the old one's options of logits."""
    defaults, known = (inspect.signature(OPS[x.name]).parameters for x in (old, op))
    options = dict(op.options)
    for name, value in old.options.items():
        if name in _OF_TILES or name in options or value == defaults[name].default:
            continue
        if name not in known and old.name not in DENSE:
            continue  # it chose the keys
        if name not in known:
            raise SettingError(
                f"--attention={op.name} has no option {name}, which the dense layers set to "
                f"{shown(value)}: take another algorithm"
            )
        options[name] = value
    return Op(op.name, options)


def _sharing(block: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's weights with the mean of the projections of queries and keys as the queries'."""
    attention = dict(block["attention"])
    for kind in ("w", "b"):
        if (key := attention.pop(f"{kind}_k", None)) is not None:
            attention[f"{kind}_q"] = (attention[f"{kind}_q"] + key) / 2
    attention.pop("k_norm", None)  # shared ones have the norm of queries
    return {**block, "attention": attention}


def _check_weights(spec: Spec, params: Any, op: Op) -> None:
    """Raises `SettingError` unless the weights are all that the model has."""
    there, wanted = named(params).keys(), named(spec.shapes()).keys()
    if other := sorted(there ^ wanted):
        why = "has weights of its own" if other[0] in wanted else "lacks weights of the model"
        raise SettingError(
            f"--attention={op.name} {why}, such as {other[0]}: take asymmetric_lsh or moba"
        )


def measure(
    spec: Spec,
    params: Any,
    op: Op,
    layers: Sequence[int],
    tokens: np.ndarray,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The bits of a token that another attention costs.

    Args:
      spec, params: the model as it was.
      op: the attention.
      layers: where it goes.
      tokens: `[B, T]`, to measure on.
      say: gets a line for each result, as it is known.

    Returns:
      The bits of the model as it was, with all layers replaced, with each alone, and by the values
      of the option that says how many keys a query sees; the bytes of caches, where it decodes.
    """

    def bits(op: Op, layers: Sequence[int]) -> float:
        return bits_of(*replaced(spec, params, op, layers), tokens)

    before, after = bits_of(spec, params, tokens), bits(op, layers)
    rows, length = tokens.shape
    say(
        f"bits of a token: {before:.4f} as it was, {after - before:+.4f} with "
        f"{op.algorithm} in {len(layers)} layers ({rows} rows of {length})"
    )
    found: dict[str, Any] = {"before": before, "after": after, "rows": rows, "length": length}
    with contextlib.suppress(NotImplementedError):  # an algorithm that does not decode
        changed = replaced(spec, params, op, layers)
        held = [cache_bytes(*model, length) for model in ((spec, params), changed)]
        found["cache_bytes"] = dict(zip(("before", "after"), held, strict=True))
        words = [f"{n / 2**20:,.1f} MiB" for n in held]
        say(f"caches of a text of {length:,} tokens: {words[0]} as it was, {words[1]} then")
    if len(layers) > 1:
        found["by_layer"] = {}
        for layer in layers:
            found["by_layer"][str(layer)] = alone = bits(op, [layer])
            say(f"layer {layer} alone: {alone - before:+.4f}")
    for name, values in _BUDGETS_OF.get(op.name, _BUDGETS).items():
        if name in inspect.signature(OPS[op.name]).parameters:
            given = op.option(name)
            others = [x for x in values if x != given]
            by_value = {x: bits(Op(op.name, {**op.options, name: x}), layers) for x in others}
            by_value = dict(sorted({**by_value, given: after}.items()))
            found[f"by_{name}"] = {str(x): one for x, one in by_value.items()}
            words = ", ".join(f"{x}: {one - before:+.4f}" for x, one in by_value.items())
            say(f"by {name}: {words}")
    return found


def bits_of(spec: Spec, params: Any, tokens: np.ndarray) -> float:
    """The mean bits of a token, each predicted from those before it in its row."""
    model = spec.build()

    def nats(params, row):
        logits = model.apply(params, row[None], rng=jax.random.key(0))[0]
        picked = jnp.take_along_axis(logits, row[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.scipy.special.logsumexp(logits, axis=-1) - picked)

    of_row = jit_once(nats)  # a row at a time: logits are large
    return float(np.mean([of_row(params, row) for row in tokens])) / math.log(2)


def cache_bytes(spec: Spec, params: Any, length: int) -> int:
    """The bytes that decoding keeps of a text of so many tokens.

    Raises:
      NotImplementedError: an algorithm cannot decode.
    """
    model = spec.build()

    def caches(params):
        return model.first_state(params, 1, length, jax.random.key(0)).caches

    return memory.size_of(jax.eval_shape(caches, params))


def tokens_of(
    spec: Spec,
    vocabulary: bytes | None,
    data_dir: Path | None,
    length: int | None = None,
    n_tokens: int | None = None,
) -> np.ndarray:
    """Rows of tokens of a text, `[B, T]`.

    Args:
      spec: the model, by whose vocabulary the text is read.
      vocabulary: a tokenizer.json or another file of pieces; None: the model is one of bytes.
      data_dir: a file or folder; None: the source of Python's standard library.
      length: of a row; None: `LENGTH`, or as many as the model has positions.
      n_tokens: in all; None: `TOKENS`. They are a row if that is longer, and fewer if the text has
        not as many.

    Raises:
      SettingError: the model reads no text or no such length, or the text is shorter than a row.
    """
    if spec.model not in _LANGUAGE_MODELS:
        raise SettingError(
            f"--attention measures bits of a text, and the model is {spec.model}: expected "
            f"{' or '.join(_LANGUAGE_MODELS)}"
        )
    size, most = spec.arguments["vocab_size"], spec.max_length()
    if length is not None and most is not None and length > most:
        raise SettingError(f"--length={length}: the model has positions for {most}")
    length = length or min(LENGTH, most or LENGTH)
    n = max(n_tokens or TOKENS, length)
    text = _text(data_dir, n * _BYTES)
    if vocabulary is not None:
        ids = PieceVocabulary.of(vocabulary, size).encode(text.decode(errors="replace"))
        tokens = np.array(ids[:n], np.int32)
    elif 0 <= size - 256 <= 2:
        tokens = np.frombuffer(text[:n], np.uint8).astype(np.int32) + size - 256
    else:
        raise SettingError(
            f"--attention measures bits of a text, and the model has {size} ids and no "
            "tokenizer.json: put it into the folder of --from"
        )
    if len(tokens) < length:
        raise SettingError(
            f"--data_dir={data_dir} has {len(tokens)} tokens: expected at least {length}"
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _text(data_dir: Path | None, n: int) -> bytes:
    """The first bytes of a text."""
    if data_dir is None:
        paths = library_files()[1]
    else:
        path = files.existing(data_dir)
        paths = files.list_files(path, "*") if path.is_dir() else [path]
    found = b""
    for path in paths:
        found += files.read_file(path)
        if len(found) >= n:
            break
    return found[:n]
