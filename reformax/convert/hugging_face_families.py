"""Decoders of today in Hugging Face's format: one row a family, config.json -> choices of a design.

Each row has what its configuration has besides `COMMON`, with the defaults of the class of
`transformers`, and how it makes the layers. `hugging_face_decoder` makes models of rows, and
config.json of models; `hugging_face_tensors` has the names of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from reformax.convert.hugging_face_config import ACTIVATIONS, ConfigField
from reformax.convert.hugging_face_family import (
    BIASES,
    FULL,
    MLP_BIAS,
    RECURRENT,
    TOKEN,
    TOKENS,
    WINDOW,
    WINDOWS,
    Family,
    Get,
    Layer,
    Only,
    every,
    listed,
)
from reformax.declared import Bounds, Count, Depth, NonNegative, Rate, Size, VocabSize, Width
from reformax.ops.numerics.rotary import RotaryBase
from reformax.ops.softmax.logit_options import SoftCap


def _by_window(get: Get) -> list[Layer]:
    """Layers that all have the window, if there is one."""
    return every(get, FULL if get["sliding_window"] is None else WINDOW)


def _qwen_layers(get: Get) -> list[Layer]:
    """The last layers have a window, if it is switched on."""
    window = get["sliding_window"] if get["use_sliding_window"] else None
    first = get["max_window_layers"]
    usual = lambda i: WINDOW if window is not None and i >= first else FULL  # noqa: E731
    return listed({**get, "sliding_window": window}, usual)


_QWEN = WINDOWS | {
    "bos_token_id": ConfigField(None, TOKEN),
    "eos_token_id": ConfigField(None, TOKENS),
    "intermediate_size": ConfigField(22016, Size),
    "max_position_embeddings": ConfigField(32768, Size),
    "max_window_layers": ConfigField(28, Count),
    "num_key_value_heads": ConfigField(32, Size | None),
    "use_sliding_window": ConfigField(False, bool),
    "vocab_size": ConfigField(151936, VocabSize),
}


def _windows(decoder) -> dict[str, Any]:
    return {"layer_types": decoder.kinds, "sliding_window": decoder.window}


def _qwen_windows(decoder) -> dict[str, Any]:
    return {**_windows(decoder), "use_sliding_window": decoder.window is not None}


def _own_biases(decoder) -> dict[str, Any]:
    return {"attention_bias": decoder.design.attention_bias}


def _llama(decoder) -> dict[str, Any]:
    return {**_own_biases(decoder), "mlp_bias": decoder.design.ff_bias}


def _qwen3_5_layers(get: Get) -> list[Layer]:
    """Recurrences, which rotate nothing, and now and then attention."""
    usual = lambda i: RECURRENT if (i + 1) % get["full_attention_interval"] else FULL  # noqa: E731
    return [Layer(kind, kind != RECURRENT) for kind, _ in listed(get, usual)]


def _recurrent_sizes(n: int, n_qk: int, d_key: int, d_value: int) -> dict[str, Any]:
    """The choices of a design that are a recurrence's heads and their sizes."""
    if n % n_qk:
        raise ValueError(f"linear_num_key_heads is {n_qk}: expected a divisor of {n}")
    names = "recurrent_heads", "recurrent_qk_heads", "recurrent_d_key", "recurrent_d_value"
    return dict(zip(names, (n, n_qk, d_key, d_value), strict=True))


def _qwen3_5_design(get: Get) -> dict[str, Any]:
    heads = get["linear_num_value_heads"], get["linear_num_key_heads"]
    sizes = _recurrent_sizes(*heads, get["linear_key_head_dim"], get["linear_value_head_dim"])
    kinds = {layer.kind for layer in _qwen3_5_layers(get)}
    gates = dict(qk_norm=True, attention_gate="elementwise") if FULL in kinds else {}
    return gates | (sizes if RECURRENT in kinds else {})


def _olmo_hybrid_layers(get: Get) -> list[Layer]:
    """Recurrences, and every fourth layer attention, which may rotate nothing."""
    n = get["num_hidden_layers"]
    last = n - 1 if n < 4 else None  # without a fourth
    usual = lambda i: FULL if i % 4 == 3 or i == last else RECURRENT  # noqa: E731
    table = get["rope_parameters"] or {}
    rotates = "rope_theta" not in table or table["rope_theta"] is not None
    return [Layer(kind, rotates and kind != RECURRENT) for kind, _ in listed(get, usual)]


def _olmo_hybrid_design(get: Get) -> dict[str, Any]:
    layers = _olmo_hybrid_layers(get)
    n = get["linear_num_value_heads"] or get["num_attention_heads"]
    n_qk = get["linear_num_key_heads"] or get["num_attention_heads"]
    d_key = get["linear_key_head_dim"] or int(0.75 * get["hidden_size"] / n_qk)
    sizes = _recurrent_sizes(n, n_qk, d_key, get["linear_value_head_dim"] or 2 * d_key)
    kinds = {layer.kind for layer in layers}
    places = tuple("input" if layer.kind == RECURRENT else "output" for layer in layers)
    norms = dict(norm_place=places) | (dict(qk_norm="joint") if FULL in kinds else {})
    return norms | (sizes if RECURRENT in kinds else {})


def _olmo_hybrid_fields(decoder) -> dict[str, Any]:
    still = {"rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    turns = decoder.recurrence.get("negative_eigenvalues", False)
    fields = {"linear_allow_neg_eigval": turns} | ({} if any(decoder.rotating) else still)
    return _qwen3_5_fields(decoder) | fields


def _qwen3_5_fields(decoder) -> dict[str, Any]:
    sizes = {
        "linear_conv_kernel_dim": "conv_size",
        "linear_key_head_dim": "recurrent_d_key",
        "linear_num_key_heads": "recurrent_qk_heads",
        "linear_num_value_heads": "recurrent_heads",
        "linear_value_head_dim": "recurrent_d_value",
    }
    found = decoder.recurrence
    fields = {theirs: found[ours] for theirs, ours in sizes.items() if found.get(ours)}
    return {"layer_types": decoder.kinds, **fields}


_GEMMA = (
    BIASES
    | WINDOWS
    | dict(
        attn_logit_softcapping=ConfigField(50.0, SoftCap | None),
        bos_token_id=ConfigField(2, TOKEN),
        eos_token_id=ConfigField(1, TOKENS),
        final_logit_softcapping=ConfigField(30.0, SoftCap | None),
        head_dim=ConfigField(256, Width | None),
        hidden_activation=ConfigField("gelu_pytorch_tanh", Literal[*ACTIVATIONS]),
        hidden_size=ConfigField(2304, Size),
        intermediate_size=ConfigField(9216, Size),
        max_position_embeddings=ConfigField(8192, Size),
        num_attention_heads=ConfigField(8, Size),
        num_hidden_layers=ConfigField(26, Depth),
        num_key_value_heads=ConfigField(4, Size | None),
        query_pre_attn_scalar=ConfigField(256, Size),
        tie_word_embeddings=ConfigField(True, bool),
        use_bidirectional_attention=ConfigField(False, Annotated[Any, Only(False)]),
        vocab_size=ConfigField(256_000, VocabSize),
    )
)
_RECURRENT = dict(
    # Biases and dropout of attention would be those of recurrences in reformax.
    attention_dropout=ConfigField(0.0, Annotated[float, Bounds(0, 0, name="0")]),
    attention_bias=ConfigField(False, Annotated[Any, Only(False)]),
    bos_token_id=ConfigField(None, TOKEN),
    hidden_act=ConfigField("silu", Literal["silu", "swish"]),
    layer_types=ConfigField(None, Sequence[Literal["full_attention", "linear_attention"]] | None),
    linear_conv_kernel_dim=ConfigField(4, Width),
    sliding_window=ConfigField(None, Annotated[Any, Only(None)]),
)
_OLMO = BIASES | dict(
    bos_token_id=ConfigField(None, TOKEN),
    eos_token_id=ConfigField(50279, TOKENS),
    rms_norm_eps=ConfigField(1e-5, NonNegative),
    vocab_size=ConfigField(50304, VocabSize),
)


def _every_nth_full(get: Get, n: int) -> list[Layer]:
    """Layers with a window, but for every n-th."""
    return listed(get, lambda i: WINDOW if (i + 1) % n else FULL)


def _gemma_design(get: Get) -> dict[str, Any]:
    scale = get["query_pre_attn_scalar"]
    return dict(
        norm_place="both",
        embedding_scale=math.sqrt(get["hidden_size"]),
        soft_cap=get["attn_logit_softcapping"],
        logits_soft_cap=get["final_logit_softcapping"],
        attention_scale=None if scale == get["head_dim"] else scale**-0.5,
    )


def _gemma_fields(decoder) -> dict[str, Any]:
    design, d_head = decoder.design, decoder.spec.arguments["d_attention_key"]
    scale = design.attention_scale
    return {
        **_own_biases(decoder),
        **_windows(decoder),
        "attn_logit_softcapping": design.soft_cap,
        "final_logit_softcapping": design.logits_soft_cap,
        "query_pre_attn_scalar": d_head if scale is None else max(round(scale**-2), 1),
    }


def _smollm3_layers(get: Get) -> list[Layer]:
    """Every fourth layer has no rotary positions, and may have a window."""
    n, every_nth = get["num_hidden_layers"], get["no_rope_layer_interval"]
    rotates = get["no_rope_layers"] or [int((i + 1) % every_nth != 0) for i in range(n)]
    if len(rotates) != n:
        raise ValueError(
            f"no_rope_layers has {len(rotates)} values: expected num_hidden_layers, {n}"
        )
    window = get["sliding_window"] if get["use_sliding_window"] else None
    usual = lambda i: WINDOW if window is not None and not rotates[i] else FULL  # noqa: E731
    layers = listed({**get, "sliding_window": window}, usual)
    return [Layer(kind, bool(x)) for (kind, _), x in zip(layers, rotates, strict=True)]


def _phi3_lengths(rotary) -> dict[str, Any]:
    """The lengths by whose ratio its class scales, where it does."""
    if rotary.scaling != "longrope":
        return {}
    trained = rotary.trained_length
    longest = round(rotary.factor * trained)
    return {"original_max_position_embeddings": trained, "max_position_embeddings": longest}


FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        BIASES | MLP_BIAS,
        design=lambda get: dict(ff_bias=get["mlp_bias"]),
        written=_llama,
        whole_heads=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        dict(
            intermediate_size=ConfigField(14336, Size),
            layer_types=ConfigField(None, Annotated[Any, Only(None)]),
            max_position_embeddings=ConfigField(2**17, Size),
            num_key_value_heads=ConfigField(8, Size | None),
            sliding_window=ConfigField(4096, Size | None),
        ),
        layers=_by_window,
        written=lambda decoder: {"sliding_window": decoder.window},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _QWEN,
        layers=_qwen_layers,
        design=lambda get: dict(attention_bias=True, attention_output_bias=False),
        written=_qwen_windows,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        BIASES | _QWEN | dict(head_dim=ConfigField(128, Width | None)),
        layers=_qwen_layers,
        design=lambda get: dict(qk_norm=True),
        written=lambda decoder: _own_biases(decoder) | _qwen_windows(decoder),
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _RECURRENT
        | dict(
            attn_output_gate=ConfigField(True, Annotated[Any, Only(True)]),
            eos_token_id=ConfigField(None, TOKENS),
            full_attention_interval=ConfigField(4, Size),
            head_dim=ConfigField(256, Width | None),
            intermediate_size=ConfigField(12288, Size),
            linear_key_head_dim=ConfigField(128, Width),
            linear_num_key_heads=ConfigField(16, Size),
            linear_num_value_heads=ConfigField(32, Size),
            linear_value_head_dim=ConfigField(128, Width),
            max_position_embeddings=ConfigField(32768, Size),
            num_attention_heads=ConfigField(16, Size),
            num_key_value_heads=ConfigField(4, Size | None),
            vocab_size=ConfigField(248320, VocabSize),
        ),
        layers=_qwen3_5_layers,
        design=_qwen3_5_design,
        written=_qwen3_5_fields,
        fraction=0.25,
        plus_one=True,
        partial=True,
        within="qwen3_5",
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA,
        layers=lambda get: listed(get, lambda i: FULL if i % 2 else WINDOW),
        design=_gemma_design,
        written=_gemma_fields,
        activation="hidden_activation",
        plus_one=True,
        whole_heads=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA
        | dict(
            attn_logit_softcapping=ConfigField(None, SoftCap | None),
            final_logit_softcapping=ConfigField(None, SoftCap | None),
            max_position_embeddings=ConfigField(2**17, Size),
            rope_local_base_freq=ConfigField(None, RotaryBase | None),
            sliding_window_pattern=ConfigField(6, Size),
            vocab_size=ConfigField(262_208, VocabSize),
        ),
        layers=lambda get: _every_nth_full(get, get["sliding_window_pattern"]),
        design=lambda get: _gemma_design(get) | dict(qk_norm=True),
        written=_gemma_fields,
        theta=1_000_000.0,
        local_theta=10_000.0,
        activation="hidden_activation",
        plus_one=True,
        whole_heads=True,
        within="gemma3",
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _OLMO,
        design=lambda get: dict(norm_place="output", qk_norm="joint"),
        written=_own_biases,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _OLMO | WINDOWS,
        layers=lambda get: _every_nth_full(get, 4),
        design=lambda get: dict(norm_place="output", qk_norm="joint"),
        written=lambda decoder: _own_biases(decoder) | _windows(decoder),
        theta=500_000.0,
        local_theta=500_000.0,
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        _RECURRENT
        | dict(
            eos_token_id=ConfigField(100257, TOKENS),
            hidden_size=ConfigField(3840, Size),
            linear_allow_neg_eigval=ConfigField(True, bool),
            linear_key_head_dim=ConfigField(None, Size | None),
            linear_num_key_heads=ConfigField(None, Size | None),
            linear_num_value_heads=ConfigField(None, Size | None),
            linear_value_head_dim=ConfigField(None, Size | None),
            max_position_embeddings=ConfigField(65536, Size),
            num_attention_heads=ConfigField(30, Size),
            vocab_size=ConfigField(100352, VocabSize),
        ),
        layers=_olmo_hybrid_layers,
        design=_olmo_hybrid_design,
        written=_olmo_hybrid_fields,
        separate=True,
        recurrent_epsilon=1e-5,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        BIASES
        | MLP_BIAS
        | dict(
            bos_token_id=ConfigField(128000, TOKEN),
            eos_token_id=ConfigField(128001, TOKENS),
            hidden_size=ConfigField(2048, Size),
            layer_types=WINDOWS["layer_types"],
            max_position_embeddings=ConfigField(32768, Size),
            no_rope_layer_interval=ConfigField(4, Size),
            no_rope_layers=ConfigField(None, Sequence[Count] | None),
            num_attention_heads=ConfigField(16, Size),
            num_hidden_layers=ConfigField(36, Depth),
            num_key_value_heads=ConfigField(4, Size | None),
            sliding_window=ConfigField(None, Size | None),
            tie_word_embeddings=ConfigField(True, bool),
            use_sliding_window=ConfigField(False, bool),
            vocab_size=ConfigField(128256, VocabSize),
        ),
        layers=_smollm3_layers,
        design=lambda get: dict(ff_bias=get["mlp_bias"]),
        written=lambda decoder: (
            _llama(decoder)
            | _qwen_windows(decoder)
            | {"no_rope_layers": [int(rotates) for rotates in decoder.rotating]}
        ),
        theta=2_000_000.0,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        dict(
            embd_pdrop=ConfigField(0.0, Rate),
            eos_token_id=ConfigField(32000, TOKENS),
            hidden_size=ConfigField(3072, Size),
            intermediate_size=ConfigField(8192, Size),
            max_position_embeddings=ConfigField(4096, Size),
            original_max_position_embeddings=ConfigField(4096, Size),
            resid_pdrop=ConfigField(0.0, Rate),
            rms_norm_eps=ConfigField(1e-5, NonNegative),
            sliding_window=ConfigField(None, Size | None),
            vocab_size=ConfigField(32064, VocabSize),
        ),
        layers=_by_window,
        written=lambda decoder: (
            {"resid_pdrop": decoder.spec.arguments["dropout"], "sliding_window": decoder.window}
            | _phi3_lengths(decoder.design.rotary)
        ),
        partial=True,
        fused=True,
        scalings=("longrope",),
    ),
)
