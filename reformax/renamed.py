"""Settings and configs that have another name now, so that runs and commands of before go on."""

from __future__ import annotations

import re

# (function, its option before) -> the option's name now.
RENAMED = {
    (op, "own"): "attend_self_if_alone"
    for op in ("asymmetric_lsh", "hash_sparse", "lsh", "routing", "shared_qk", "smyrf")
}
_KINDS = {
    "remat": ("Transformer", "TransformerEncoder", "TransformerLM", "TransformerMaskedLM"),
    "keep_activations": ("Reformer", "ReformerEncoder", "ReformerLM", "ReformerMaskedLM"),
}
RENAMED |= {(model, option): "remat_policy" for option, x in _KINDS.items() for model in x}
# The option before -> its values before and now, where they have changed.
_VALUES = {
    "remat": {"True": "'nothing'", "False": "'all'"},
    "keep_activations": {"True": "'all'", "False": "'nothing'"},
}

# The name of a config before -> its name now, without .gin.
CONFIGS = {
    "block_sparse_enwik8_ten_minutes": "transformer_enwik8_block_sparse_38m",
    "enwik8_ten_minutes": "enwik8_38m",
    "long_text": "text_64k_37m",
    "long_text_124m": "text_64k_122m",
    "reformer_enwik8_small": "reformer_enwik8_800k",
    "reformer_enwik8_ten_minutes": "reformer_enwik8_38m",
    "reformer_long": "reformer_text_64k_37m",
    "reformer_long_124m": "reformer_text_64k_122m",
    "reformer_lsh_enwik8_ten_minutes": "reformer_enwik8_lsh_38m",
    "reformer_text_long": "reformer_text_16k_37m",
    "reformer_text_ten_minutes": "reformer_text_37m",
    "sparse_fixed_enwik8": "sparse_fixed_enwik8_95m",
    "sparse_strided_images": "sparse_strided_images_59m",
    "text_ten_minutes": "text_37m",
    "transformer_enwik8_small": "transformer_enwik8_800k",
    "transformer_enwik8_ten_minutes": "transformer_enwik8_38m",
    "transformer_long": "transformer_text_64k_37m",
    "transformer_long_124m": "transformer_text_64k_122m",
    "transformer_text_long": "transformer_text_16k_37m",
    "transformer_text_ten_minutes": "transformer_text_37m",
    "transformer_windows_enwik8_ten_minutes": "transformer_enwik8_windows_38m",
}


def translated(text: str) -> tuple[str, list[str]]:
    """The text of a saved config with the settings' names of today.

    Returns:
      The text, and a line for each setting that it names otherwise, "own is attend_self_if_alone".
    """
    found = set()

    def rename(match: re.Match) -> str:
        head, function, option, equals, value = match.groups()
        now = RENAMED.get((function, option))
        if now is None:
            return match[0]
        if option in _VALUES:
            value = _VALUES[option].get(_value(text, value))
            if value is None:
                return match[0]
        found.add(f"{function}.{option} is {function}.{now}")
        return f"{head}{function}.{now}{equals}{value}"

    line = re.compile(r"^((?:[\w/.-]*[./])?)(\w+)\.(\w+)(\s*=[ \t]*)(.*)$", re.MULTILINE)
    return line.sub(rename, text), sorted(found)


def _value(text: str, value: str) -> str:
    """A setting's value, or that of the macro `%NAME` which it is, whose value may be one too."""
    value, seen = value.partition("#")[0].strip(), set()
    while value.startswith("%") and value not in seen:
        seen.add(value)
        name = re.escape(value[1:])
        macro = re.search(rf"^{name}[ \t]*=[ \t]*(%?\w+)", text, re.MULTILINE)
        value = macro[1] if macro else value
    return value
