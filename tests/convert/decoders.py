"""Decoders in Hugging Face's format: the defaults of each class, cut in size, with drawn weights.

`make_decoders_fixture.py` writes what `transformers` makes of them to decoders.npz.
"""

import zlib
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("decoders.npz")
LENGTH, PROMPT, NEW = 21, 9, 12
WIDTH = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=4,
    num_hidden_layers=3,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPS = dict(num_key_value_heads=2)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16)
# Of more, and of fewer, trained positions than the texts of the tests have.
LONGROPE, SHORTROPE = (
    dict(
        rope_type="longrope",
        rope_theta=1000.0,
        short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        long_factor=[1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
        original_max_position_embeddings=trained,
    )
    for trained in (8, 100)
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1000.0, factor=4.0)
QWEN3_5 = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
# A row: the class's name before "Config", and what differs from its defaults besides the width.
CASES = {
    "llama": ("Llama", {}),
    "llama 3.1": ("Llama", GROUPS | dict(rope_parameters=LLAMA3, head_dim=10)),
    "llama, biases, tied": (
        "Llama",
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    ),
    "llama, linear": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=300.0, factor=3.0)),
    ),
    "mistral": ("Mistral", GROUPS),
    "mistral, narrow": ("Mistral", GROUPS | dict(sliding_window=5)),
    "qwen2": ("Qwen2", dict(num_key_value_heads=4)),
    "qwen2.5": ("Qwen2", GROUPS | dict(tie_word_embeddings=True, rope_parameters=YARN)),
    "qwen2, windows": (
        "Qwen2",
        GROUPS | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", GROUPS | dict(head_dim=16)),
    "qwen3.5": ("Qwen3_5Text", QWEN3_5 | GROUPS | dict(head_dim=24, num_hidden_layers=4)),
    "qwen3.5, tied": (
        "Qwen3_5Text",
        QWEN3_5
        | dict(
            num_key_value_heads=4,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            num_hidden_layers=2,
            tie_word_embeddings=True,
            linear_conv_kernel_dim=3,
        ),
    ),
    "gemma 2": ("Gemma2", GROUPS | dict(head_dim=16)),
    "gemma 2, narrow": (
        "Gemma2",
        GROUPS | dict(head_dim=16, query_pre_attn_scalar=9, sliding_window=5, attention_bias=True),
    ),
    "gemma 3": ("Gemma3Text", GROUPS | dict(head_dim=16, num_hidden_layers=7)),
    "gemma 3, narrow": (
        "Gemma3Text",
        GROUPS
        | dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=4,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
    "olmo 2": ("Olmo2", {}),
    "olmo 2, groups": ("Olmo2", GROUPS | dict(attention_bias=True, tie_word_embeddings=True)),
    "olmo 3": ("Olmo3", dict(num_hidden_layers=4)),
    "olmo 3, yarn": (
        "Olmo3",
        GROUPS
        | dict(
            num_hidden_layers=4,
            sliding_window=6,
            rope_parameters=dict(
                full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e3)
            ),
        ),
    ),
    "olmo hybrid": ("OlmoHybrid", dict(num_hidden_layers=4)),
    "olmo hybrid, still": (
        "OlmoHybrid",
        dict(rope_parameters=dict(rope_theta=None), num_hidden_layers=2),
    ),
    "olmo hybrid, rotary": (
        "OlmoHybrid",
        GROUPS
        | dict(
            layer_types=["full_attention", "linear_attention"] * 2,
            num_hidden_layers=4,
            linear_key_head_dim=8,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_allow_neg_eigval=False,
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
            rms_norm_eps=1e-3,
            tie_word_embeddings=True,
        ),
    ),
    "smollm 3": ("SmolLM3", GROUPS | dict(num_hidden_layers=4)),
    "smollm 3, windows": (
        "SmolLM3",
        GROUPS
        | dict(
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 1, 0],
            use_sliding_window=True,
            sliding_window=5,
            tie_word_embeddings=False,
        ),
    ),
    "phi 3": ("Phi3", {}),
    "phi 3, narrow": ("Phi3", GROUPS | dict(sliding_window=7, resid_pdrop=0.1)),
    "phi 3, longrope": (
        "Phi3",
        GROUPS
        | dict(
            rope_parameters=LONGROPE,
            original_max_position_embeddings=8,
            max_position_embeddings=64,
        ),
    ),
    "phi 3, longrope of short texts": (
        "Phi3",
        dict(
            rope_parameters=SHORTROPE,
            original_max_position_embeddings=100,
            max_position_embeddings=400,
        ),
    ),
    "llama, dynamic": ("Llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=80)),
    "phi 3, partial": ("Phi3", GROUPS | dict(partial_rotary_factor=0.5)),
    "qwen3, tied": (
        "Qwen3",
        GROUPS | dict(head_dim=16, tie_word_embeddings=True, attention_bias=True),
    ),
}


def weights_of(shapes):
    """Weights about as large as trained ones, each drawn by its name."""

    def drawn(name, shape):
        x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        return (1 + 0.3 * x if len(shape) == 1 else 0.15 * x).astype(np.float32)

    return {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}


def some_tokens():
    """Tokens `[2, LENGTH]` behind the first one."""
    tokens = np.random.default_rng(1).integers(3, WIDTH["vocab_size"], (2, LENGTH))
    tokens[:, 0] = WIDTH["bos_token_id"]
    return tokens.astype(np.int32)


# With torch and transformers.


def theirs_of(name):
    """The model of `transformers`."""
    import torch
    import transformers

    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**WIDTH | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    shapes = {key: x.shape for key, x in model.named_parameters()}
    drawn = {key: torch.tensor(x) for key, x in weights_of(shapes).items()}
    left_out, unknown = model.load_state_dict(drawn, strict=False)
    assert not unknown and set(left_out) <= {"lm_head.weight"}
    return model


def logits_of(theirs, tokens):
    """The logits that it makes of tokens."""
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.numpy()


def greedy_of(theirs, tokens):
    """The `NEW` tokens that it goes on with."""
    import torch

    prompt = torch.tensor(tokens, dtype=torch.long)
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None)
    made = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return made[:, tokens.shape[1] :].numpy()
