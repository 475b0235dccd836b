"""Compares the logits of a converted model with those of its source, on random tokens."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reformax.convert import trax_files, trax_models
from reformax.convert.spec import Op, Spec
from reformax.layers._trax import ShapeDtype
from reformax.ops.hashing import angular as hashing
from reformax.training.step import jit_once

# Beyond this length a comparison takes too long on a CPU.
MAX_LENGTH = 4096


class Comparison(NamedTuple):
    """The result of a check."""

    difference: float  # the largest difference of two logits
    scale: float  # the largest logit
    what: str  # the other model

    def agrees(self, tolerance: float) -> bool:
        """Whether the difference is at most this share of the largest logit, or of 1 if above.

        False if any logit is not finite.
        """
        # Every comparison with NaN is false.
        bound = tolerance * max(1.0, self.scale)
        return math.isfinite(self.scale) and self.difference <= bound


def length_for(spec: Spec) -> int:
    """A length to compare at: two and a half of the longest chunks, if positions hold so many."""
    chunk_lens = [op.option("chunk_len") for op in spec.attention if op.name in ("local", "lsh")]
    length = max([5 * n // 2 for n in chunk_lens], default=64) + 1
    return min(length, spec.max_length() or length, MAX_LENGTH)


def logits_of(spec: Spec, rotations=None) -> Callable[[Any, np.ndarray], np.ndarray]:
    """A function `(params, inputs) -> logits` in float32, of inputs that are not shifted.

    Args:
      spec: the model.
      rotations: of LSH attention; None draws them.
    """
    model = in_full_float32(spec).build(rotations=rotations)

    def logits(params, inputs):
        return model.logits(params, model.encode(params, inputs, rng=jax.random.key(0)))

    run = jit_once(logits)

    def in_full(params, inputs):
        with jax.default_matmul_precision("highest"):  # GPUs round float32 to 10 bits else
            return np.asarray(run(params, inputs))

    return in_full


def random_inputs(spec: Spec, length: int) -> np.ndarray:
    """Random tokens `[1, T]` with 0 in front, like an input that was shifted right."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, spec.arguments["vocab_size"], (1, length)).astype(np.int32)
    tokens[:, 0] = 0
    return tokens


def against_params(
    spec: Spec, params: Any, other: Any, what: str, other_spec: Spec | None = None
) -> Comparison:
    """Compares a model with what was written of it and read again.

    Args:
      spec: the model.
      params: its weights.
      other: those that were read.
      what: the name of what was read.
      other_spec: the model that was read; None: the same, which is not kept with the weights.
    """
    inputs = random_inputs(spec, length_for(spec))
    logits = logits_of(spec)
    reread = logits if other_spec is None else logits_of(other_spec)
    ours, theirs = logits(params, inputs), reread(other, inputs)
    return _comparison(ours, theirs, f"{what}, {inputs.shape[1]} tokens")


def against_trax(spec: Spec, params: Any, path: str | Path) -> Comparison | None:
    """Compares with Trax's own model and the weights of a file; None if inputs are too long."""
    length = trax_models.length_of(spec)
    if length > MAX_LENGTH:
        return None
    spec = _with_bucket_counts(spec, length)
    model = trax_models.model_of(spec)
    trax_files.load(model, path, ShapeDtype((1, length), np.int32))
    n_heads = spec.arguments["n_heads"]
    keys = jax.random.split(jax.random.PRNGKey(0), n_heads)
    # Every LSH layer hashes with the same rotations, drawn by one rng for each head.
    state = jax.tree.map(lambda s: keys if _is_rngs(s, n_heads) else s, model.state)
    inputs = random_inputs(spec, length)
    shifted_back = np.roll(inputs, -1, axis=1)  # Trax shifts right, and puts 0 in front
    run = jit_once(lambda *args: model.pure_fn(*args)[0])
    theirs = run(shifted_back, model.weights, state, jax.random.PRNGKey(0))
    rotations = _rotations_of_trax(spec, keys)
    ours = logits_of(spec, rotations)(params, inputs)
    return _comparison(ours, np.asarray(theirs), f"Trax's own model, {length} tokens")


def _is_rngs(state: Any, n_heads: int) -> bool:
    return getattr(state, "dtype", None) == jnp.uint32 and state.shape == (n_heads, 2)


def _rotations_of_trax(spec: Spec, keys: jax.Array) -> jax.Array | None:
    ops = [op for op in spec.attention if op.name == "lsh"]
    if not ops:
        return None
    sizes = {(op.option("n_hashes"), _n_rotations(op)) for op in ops}
    if len(sizes) > 1:
        raise NotImplementedError(f"LSH layers with several numbers of hashes or buckets: {sizes}")
    shape = (spec.arguments["d_attention_key"], *sizes.pop())
    return jnp.stack([jax.random.normal(jax.random.split(key)[1], shape) for key in keys])


def _n_rotations(op: Op) -> int:
    n_buckets = op.option("n_buckets")
    return (n_buckets if isinstance(n_buckets, int) else sum(n_buckets)) // 2


def _with_bucket_counts(spec: Spec, length: int) -> Spec:
    """The spec for a length, with numbers in place of `n_buckets="auto"`."""
    ops = []
    for op in spec.attention:
        if op.name == "lsh" and op.option("n_buckets") == "auto":
            sizes = hashing.auto_buckets(length, op.option("chunk_len"))
            n_buckets = sizes[0] if len(sizes) == 1 else sizes
            op = Op(op.name, {**op.options, "n_buckets": n_buckets})
        ops.append(op)
    return spec._replace(attention=tuple(ops))


def in_full_float32(spec: Spec) -> Spec:
    """The spec with float32 in sublayers, streams and attention, as the other models have."""
    exact = {"exact": False} if "exact" in spec.arguments else {}
    # Kernels round products to their hardware's.
    attention = tuple(Op(op.name, {**op.options, "impl": "xla"}) for op in spec.attention)
    arguments = {**spec.arguments, "dtype": "float32", **exact}
    return spec._replace(arguments=arguments, attention=attention)


def has_transformers() -> bool:
    """Whether transformers and torch are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def against_transformers(spec: Spec, params: Any, folder: str | Path) -> Comparison:
    """Compares with `transformers`' own model of a folder, given its rotations."""
    import torch
    import transformers

    from reformax.convert.hugging_face import CONFIG, DECODER, class_of, read_config

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = str(folder if Path(folder).is_dir() else Path(folder).parent)
    name = class_of(spec, read_config(Path(folder) / CONFIG))
    # Attention in plain operations has every family's bound of logits.
    eager = {"attn_implementation": "eager"} if name == DECODER else {}
    model = getattr(transformers, name).from_pretrained(folder, **eager).float().eval()
    rotations, seed = None, 0
    if spec.model == "ReformerLM":
        for layer in model.reformer.encoder.layers:
            layer.attention.self_attention.hash_seed = seed
    ops = [op for op in spec.attention if op.name == "lsh"]
    if ops:
        torch.manual_seed(seed)
        n_heads, size = spec.arguments["n_heads"], spec.arguments["d_attention_key"]
        sizes = (n_heads, size, ops[0].option("n_hashes"), _n_rotations(ops[0]))
        rotations = torch.randn(sizes).numpy()
    inputs = random_inputs(spec, length_for(spec))
    with torch.no_grad():
        theirs = model(torch.tensor(inputs.astype(np.int64)), use_cache=False).logits
        if spec.model == "ReformerLM":  # versions differ in which bias of a file they add, if any
            added = model.lm_head.decoder.bias
            theirs = theirs - (0 if added is None else added)
            theirs = theirs + torch.tensor(np.asarray(params["logits"]["b"]))
    ours = logits_of(spec, rotations)(params, inputs)
    what = f"transformers {transformers.__version__}, {inputs.shape[1]} tokens"
    return _comparison(ours, theirs.numpy(), what)


def _comparison(ours: np.ndarray, theirs: np.ndarray, what: str) -> Comparison:
    with np.errstate(invalid="ignore"):  # infinities give NaN, which does not agree
        difference = np.abs(ours - theirs).max()
    return Comparison(float(difference), float(np.abs(ours).max()), what)
