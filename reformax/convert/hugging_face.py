"""Hugging Face's `ReformerModelWithLMHead`: its config, its tensors, its files.

The function of `transformers` is `lm.ReformerLM` with these arguments, which `spec_of` finds:

  * LSH layers: chunks in a circle, keys counted each time, factored buckets, given rotations or
    drawn ones; attention over everything where one chunk covers the length; the same rounding
    where a position finds only itself (`self_score`).
  * Local layers: queries and keys of their own. Their circle is invisible to causal attention
    unless a chunk sees two or more before it.
  * Axial positions, or a table of positions, which is one axis.
  * `logits` at position t there are those of token t + 1: `encode` reads tokens as they are, while
    `apply` shifts them right and puts token 0 in front, as the models were trained in Trax.

What differs: rows of padding, which are nobody's business, and what dropout drops in training.
Since version 5 `transformers` leaves out `lm_head.bias`, which is in its files and which version 4
added; `logits` adds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax.convert import tables
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor

CONFIG, SAFETENSORS, TORCH = "config.json", "model.safetensors", "pytorch_model.bin"
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
SELF_SCORE = -1e5

# What ReformerConfig takes where config.json is silent.
DEFAULTS = {
    "attention_head_size": 64,
    "attn_layers": ["local", "lsh"] * 3,
    "axial_pos_embds": True,
    "axial_pos_embds_dim": [64, 192],
    "axial_pos_shape": [64, 64],
    "chunk_size_feed_forward": 0,
    "feed_forward_size": 512,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.05,
    "hidden_size": 256,
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "local_attention_probs_dropout_prob": 0.05,
    "local_attn_chunk_length": 64,
    "local_num_chunks_after": 0,
    "local_num_chunks_before": 1,
    "lsh_attention_probs_dropout_prob": 0.0,
    "lsh_attn_chunk_length": 64,
    "lsh_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_buckets": None,
    "num_hashes": 1,
    "vocab_size": 320,
}


class Checkpoint(NamedTuple):
    """A model of Hugging Face in the terms of this package."""

    spec: Spec
    params: Any
    config: dict[str, Any]  # config.json as it was
    notes: list[str]  # what differs, one line each


def spec_of(config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on what differs.

    Raises:
      ValueError: no causal Reformer, or a value that this package or `transformers` has no use for.
    """
    if config.get("model_type", "reformer") != "reformer":
        raise ValueError(f"model_type is {config['model_type']!r}: expected 'reformer'")
    get = {**DEFAULTS, **config}
    _check_numbers(get)
    layers, notes = get["attn_layers"], []
    kinds = sorted(set(layers))
    if not layers or set(kinds) - {"local", "lsh"}:
        raise ValueError(f"attn_layers is {layers}: expected 'local' and 'lsh'")
    if get["is_decoder"] is not True:
        raise ValueError("is_decoder is false: ReformerLM is causal, set it in config.json")
    if get["hidden_act"] not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act is {get['hidden_act']!r}: expected one of {', '.join(ACTIVATIONS)}"
        )
    for kind in kinds:
        n_after = get[f"{kind}_num_chunks_after"]
        if n_after:
            raise ValueError(f"{kind}_num_chunks_after is {n_after}: a causal model has 0")
    whole = math.lcm(*(get[f"{kind}_attn_chunk_length"] for kind in kinds))
    rates = {get[f"{kind}_attention_probs_dropout_prob"] for kind in kinds}
    if len(rates) > 1:
        notes.append(
            f"attention dropout: local and LSH layers have {sorted(rates)} there and one rate "
            f"here, {max(rates)}; training alone can tell"
        )
    period = next(n for n in range(1, len(layers) + 1) if layers == layers[:n] * (len(layers) // n))
    cycle = [_op(kind, get, whole) for kind in layers[:period]]
    if get["axial_pos_embds"]:
        shape, d_embs = tuple(get["axial_pos_shape"]), tuple(get["axial_pos_embds_dim"])
    else:
        shape, d_embs = (get["max_position_embeddings"],), (get["hidden_size"],)
    spec = Spec.make(
        "ReformerLM",
        cycle,
        vocab_size=get["vocab_size"],
        d_model=get["hidden_size"],
        d_ff=get["feed_forward_size"],
        d_attention_key=get["attention_head_size"],
        d_attention_value=get["attention_head_size"],
        n_layers=len(layers),
        n_heads=get["num_attention_heads"],
        dropout=get["hidden_dropout_prob"],
        attention_dropout=max(rates),
        pos_type="axial",
        pos_axial_shape=shape,
        pos_d_axial_embs=d_embs,
        ff_activation=ACTIVATIONS[get["hidden_act"]],
        ff_chunk_size=get["chunk_size_feed_forward"],
        norm_epsilon=get["layer_norm_eps"],
    )
    return spec, notes


def _check_numbers(get: Mapping[str, Any]) -> None:
    unused = {kind for kind in ("local", "lsh") if kind not in get["attn_layers"]}
    for name, default in DEFAULTS.items():
        value, lists = get[name], isinstance(default, list) and name != "attn_layers"
        if isinstance(default, bool | str) or name in ("attn_layers", "num_buckets"):
            continue
        if name.partition("_")[0] in unused:  # null in the configs of models without such layers
            continue
        values = value if lists and isinstance(value, list | tuple) else [value]
        kinds = (int, float) if isinstance(default, float) else (int,)
        least = 0 if isinstance(default, float) or "chunk" in name else 1
        if not all(type(v) in kinds and v >= least for v in values):
            raise ValueError(f"{name} is {value!r}: expected something like {default!r}")


def _op(kind: str, get: Mapping[str, Any], whole: int) -> Op:
    chunk_len, n_before = get[f"{kind}_attn_chunk_length"], get[f"{kind}_num_chunks_before"]
    circle = {"wrap": True, "pad_chunks": whole // chunk_len}
    options: dict[str, Any] = {"chunk_len": chunk_len, "n_chunks_before": n_before}
    if kind == "local":
        return Op("local", options | (circle if n_before > 1 else {}))
    n_buckets = get["num_buckets"]
    if n_buckets is None:
        raise ValueError(
            "num_buckets is null: transformers chooses it for the first sequence that it sees; "
            "write a number into config.json, such as twice the length over the chunk length"
        )
    n_buckets = n_buckets if isinstance(n_buckets, int) else tuple(n_buckets)
    options |= {"n_hashes": get["num_hashes"], "n_buckets": n_buckets, "count_once": False}
    return Op("lsh", options | circle | {"self_score": SELF_SCORE})


def config_of(spec: Spec, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      spec: the model.
      like: a config.json that the model was read from: values that say the same stay.

    Raises:
      ValueError: Hugging Face's Reformer has no such model; the line names what it lacks.
    """
    arguments, like = spec.arguments, like or {}
    _require(spec.model == "ReformerLM", f"the model is {spec.model}", "ReformerLM")
    _require(arguments["pos_type"] == "axial", f"pos_type is {arguments['pos_type']!r}", "'axial'")
    shape, d_embs = list(arguments["pos_axial_shape"]), list(arguments["pos_d_axial_embs"])
    _require(len(shape) < 3, f"pos_axial_shape is {tuple(shape)}", "one or two axes")
    _require(not arguments["attention_bias"], "attention_bias is True", "False")
    d_head = arguments["d_attention_key"]
    _require(
        d_head == arguments["d_attention_value"],
        f"d_attention_value is {arguments['d_attention_value']}",
        f"d_attention_key, {d_head}",
    )
    activation = arguments["ff_activation"]
    activation = activation if isinstance(activation, str) else "gelu_tanh"
    acts = [name for name, ours in ACTIVATIONS.items() if ours == activation]
    repeated = [op for *_, op in spec.layers()]
    config: dict[str, Any] = {
        "architectures": ["ReformerModelWithLMHead"],
        "model_type": "reformer",
        "is_decoder": True,
        "attn_layers": [op.name for op in repeated],
        "attention_head_size": d_head,
        "axial_pos_embds": len(shape) == 2,
        "chunk_size_feed_forward": arguments["ff_chunk_size"],
        "feed_forward_size": arguments["d_ff"],
        "hidden_act": like.get("hidden_act") if like.get("hidden_act") in acts else acts[0],
        "hidden_dropout_prob": arguments["dropout"],
        "hidden_size": arguments["d_model"],
        "layer_norm_eps": arguments["norm_epsilon"],
        "max_position_embeddings": math.prod(shape),
        "num_attention_heads": arguments["n_heads"],
        "num_hidden_layers": len(repeated),
        "tie_word_embeddings": False,
        "vocab_size": arguments["vocab_size"],
    }
    if len(shape) == 2:
        config |= {"axial_pos_shape": shape, "axial_pos_embds_dim": d_embs}
    for kind in ("local", "lsh"):
        ops = [op for op in spec.attention if op.name == kind]
        if ops:
            same = all(op.options == ops[0].options for op in ops)
            _require(same, f"the {kind} layers have several settings", "one")
            config |= {
                f"{kind}_attn_chunk_length": ops[0].option("chunk_len"),
                f"{kind}_num_chunks_before": ops[0].option("n_chunks_before"),
                f"{kind}_num_chunks_after": 0,
                f"{kind}_attention_probs_dropout_prob": arguments["attention_dropout"],
            }
    kinds = {op.name for op in repeated}
    _require(kinds <= {"local", "lsh"}, f"the attention is {', '.join(kinds)}", "local and lsh")
    chunk_lens = [config[f"{kind}_attn_chunk_length"] for kind in kinds]
    for op in spec.attention:
        _require_same_function(op, math.lcm(*chunk_lens) // op.option("chunk_len"))
        if op.name == "lsh":
            n_buckets = op.option("n_buckets")
            config["num_buckets"] = n_buckets if isinstance(n_buckets, int) else list(n_buckets)
            config["num_hashes"] = op.option("n_hashes")
    # What the model was read from may say more, as long as it says the same.
    kept = {**like, **config}
    for kind in ("local", "lsh"):
        rate = f"{kind}_attention_probs_dropout_prob"
        if rate in like and spec_of(like)[0].arguments["attention_dropout"] == config.get(rate):
            kept[rate] = like[rate]
    if "max_position_embeddings" in like and len(shape) == 2:
        kept["max_position_embeddings"] = like["max_position_embeddings"]
    return kept


def _require_same_function(op: Op, pad_chunks: int) -> None:
    wanted = {"n_chunks_after": 0}
    if op.name == "local":
        wanted |= {"window": None, "shared_qk": False}
        if op.option("n_chunks_before") > 1:
            wanted |= {"wrap": True, "pad_chunks": pad_chunks}
    else:
        wanted |= {"count_once": False, "wrap": True, "pad_chunks": pad_chunks}
        wanted |= {"self_score": SELF_SCORE}
        n_eval = op.option("n_hashes_eval")
        _require(n_eval in (None, op.option("n_hashes")), f"n_hashes_eval is {n_eval}", "n_hashes")
        _require(op.option("n_buckets") != "auto", "n_buckets is 'auto'", "a number")
    for name, value in wanted.items():
        _require(
            op.option(name) == value, f"{op.name}'s {name} is {op.option(name)!r}", repr(value)
        )


def _require(holds: bool, what: str, instead: str) -> None:
    if not holds:
        raise ValueError(f"Hugging Face's Reformer has no such model: {what}, expected {instead}")


def table(spec: Spec) -> list[Tensor]:
    """The tensors of `ReformerModelWithLMHead`, and which weight each one is."""
    a = spec.arguments
    d, d_ff, vocab = a["d_model"], a["d_ff"], a["vocab_size"]
    n, h = a["n_heads"], a["d_attention_key"]
    shape, d_embs = a["pos_axial_shape"], a["pos_d_axial_embs"]

    def transposed(x):
        return x.T

    def heads_in(name, path, repeat):  # [N H, D] <-> [N, D, H]
        return Tensor(
            name,
            path,
            (n * h, d),
            repeat,
            lambda x: x.reshape(n, h, d).transpose(0, 2, 1),
            lambda x: x.transpose(0, 2, 1).reshape(n * h, d),
        )

    def norm(name, path, size, repeat=None):
        for theirs, ours in (("weight", "scale"), ("bias", "bias")):
            yield Tensor(f"{name}.{theirs}", (*path, ours), (size,), repeat)

    rows = [Tensor("reformer.embeddings.word_embeddings.weight", ("embedding",), (vocab, d))]
    positions = "reformer.embeddings.position_embeddings"
    if len(shape) == 1:
        rows.append(Tensor(f"{positions}.embedding.weight", ("positions", "axis_0"), (shape[0], d)))
    for axis in range(len(shape) if len(shape) > 1 else 0):
        there = [1] * len(shape) + [d_embs[axis]]
        there[axis] = shape[axis]
        here = (shape[axis], d_embs[axis])
        rows.append(
            Tensor(
                f"{positions}.weights.{axis}",
                ("positions", f"axis_{axis}"),
                tuple(there),
                None,
                lambda x, here=here: x.reshape(here),
            )
        )
    for layer, block, repeat, op in spec.layers():
        name, path = f"reformer.encoder.layers.{layer}", ("stack", f"block_{block}")
        attention, feed_forward = (*path, "attention"), (*path, "feed_forward")
        rows += norm(f"{name}.attention.layer_norm", (*path, "attention_norm"), d, repeat)
        theirs = {"w_q": "query_key", "w_v": "value"}
        if op.name == "local":
            theirs = {"w_q": "query", "w_k": "key", "w_v": "value"}
        for ours, projection in theirs.items():
            projection = f"{name}.attention.self_attention.{projection}.weight"
            rows.append(heads_in(projection, (*attention, ours), repeat))
        rows.append(
            Tensor(
                f"{name}.attention.output.dense.weight",
                (*attention, "w_o"),
                (d, n * h),
                repeat,
                lambda x: x.T.reshape(n, h, d),
                lambda x: x.reshape(n * h, d).T,
            )
        )
        rows += norm(f"{name}.feed_forward.layer_norm", (*path, "feed_forward_norm"), d, repeat)
        for ours, part, sizes in (("1", "dense", (d_ff, d)), ("2", "output", (d, d_ff))):
            part = f"{name}.feed_forward.{part}.dense"
            weight = (*feed_forward, f"w{ours}")
            rows.append(Tensor(f"{part}.weight", weight, sizes, repeat, transposed, transposed))
            rows.append(Tensor(f"{part}.bias", (*feed_forward, f"b{ours}"), sizes[:1], repeat))
    rows += norm("reformer.encoder.layer_norm", ("norm",), 2 * d)
    head = Tensor(
        "lm_head.decoder.weight", ("logits", "w"), (vocab, 2 * d), None, transposed, transposed
    )
    return [*rows, head, Tensor("lm_head.bias", ("logits", "b"), (vocab,))]


def read(path: str | Path) -> Checkpoint:
    """Reads a folder of `save_pretrained`, or one file of tensors with config.json beside it.

    Raises:
      ValueError: not a Reformer, damaged, or tensors that are not those of config.json.
      OSError: nothing is there.
    """
    path = Path(path).expanduser()
    folder = path if path.is_dir() else path.parent
    config = read_config(folder / CONFIG)
    spec, notes = spec_of(config)
    files = [path] if path.is_file() else _files(folder)
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= _tensors(file)
    if tensors.get("lm_head.bias", np.zeros(1)).any():
        notes.append(
            "lm_head.bias is not zero: transformers 5 leaves it out of its logits, and this model "
            "adds it, as transformers 4 did"
        )
    params = tables.read(table(spec), _without_copies(tensors, str(path)), str(path))
    return Checkpoint(spec, params, config, notes)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; ValueError if it is not one."""
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: it belongs beside the tensors") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object: copy it again")
    return config


def _files(folder: Path) -> list[Path]:
    for name in (SAFETENSORS, TORCH):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [
                folder / part for part in sorted(set(read_config(index)["weight_map"].values()))
            ]
    raise FileNotFoundError(f"{folder} has no {SAFETENSORS} and no {TORCH}")


def _tensors(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): copy it again") from None
    try:
        import torch
    except ImportError:
        raise ImportError(
            f"{path} is a file of PyTorch, which is not installed: pip install torch, or convert "
            "it to safetensors where it is"
        ) from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a hostile or damaged file raises is no one kind
        reason = str(error).strip().splitlines()
        reason = reason[0] if reason else type(error).__name__
        raise ValueError(f"{path} is refused: it is not tensors alone ({reason})") from None
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def _without_copies(tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """The tensors without what older versions wrote besides: constants, and the bias again."""
    tensors = {
        name: array
        for name, array in tensors.items()
        if not name.endswith(("mask_value_float16", "mask_value_float32"))
    }
    copy = tensors.pop("lm_head.decoder.bias", None)
    if copy is not None and not np.array_equal(copy, tensors.setdefault("lm_head.bias", copy)):
        raise ValueError(f"{where}: lm_head.decoder.bias and lm_head.bias differ: one was changed")
    return tensors


def write(
    folder: str | Path, spec: Spec, params: Any, like: Mapping[str, Any] | None = None
) -> Sequence[Path]:
    """Writes config.json and model.safetensors, for `ReformerModelWithLMHead.from_pretrained`.

    Args:
      folder: made if it is not there.
      spec: the model.
      params: its weights.
      like: the config.json that the model was read from, if any.

    Raises:
      ValueError: Hugging Face's Reformer has no such model.
    """
    from safetensors.numpy import save_file

    config = config_of(spec, like)
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tables.write(table(spec), params), folder / SAFETENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return [folder / CONFIG, folder / SAFETENSORS]
