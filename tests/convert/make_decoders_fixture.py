"""Makes decoders.npz: config.json, logits and greedy tokens of `transformers` for each decoder.

    python -m tests.convert.make_decoders_fixture

Needs torch and transformers, which the tests do not. Weights are drawn by name, so that none are in
the file.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.convert import decoders


def main() -> None:
    """Writes the fixture."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    arrays, tokens = {"versions": json.dumps(versions)}, decoders.some_tokens()
    for name in decoders.CASES:
        theirs = decoders.theirs_of(name)
        with tempfile.TemporaryDirectory() as folder:
            theirs.config.save_pretrained(folder)
            arrays[f"{name}/config"] = (Path(folder) / "config.json").read_text()
        # Of the last positions, which have read all others.
        arrays[f"{name}/logits"] = decoders.logits_of(theirs, tokens)[:, -4:]
        arrays[f"{name}/greedy"] = decoders.greedy_of(theirs, tokens[:, : decoders.PROMPT])
    np.savez_compressed(decoders.PATH, **arrays)
    print(f"{decoders.PATH}: {decoders.PATH.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()
