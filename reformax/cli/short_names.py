"""The short names of settings that a config may set without saying whose they are.

`d_model = 512` of a config, and `--config=d_model=512`, is the argument `d_model` of the model, of
the models of its stages, and of `loop.train`, unless the config sets that argument itself. So a
file of sizes serves every model.
"""

from __future__ import annotations

# Arguments that share a short name: sizes of one head, of either stack, of either language.
_SHARED = {
    "d_head": ("d_attention_key", "d_attention_value"),
    "n_layers": ("n_encoder_layers", "n_decoder_layers"),
    "vocab_size": ("input_vocab_size",),
    "attention": (
        "attention_type",
        "encoder_attention_type",
        "decoder_attention_type",
        "cross_attention_type",
    ),
}
_OF = {argument: name for name, arguments in _SHARED.items() for argument in arguments}


def of(argument: str) -> str:
    """The short name of an argument of a model or of `loop.train`: `d_head` of d_attention_key."""
    return _OF.get(argument, argument)
