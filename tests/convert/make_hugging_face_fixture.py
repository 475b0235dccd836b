"""Makes hugging_face.npz: tiny models of Hugging Face, their inputs and their outputs.

    python tests/convert/make_hugging_face_fixture.py

Needs torch and transformers, which the tests do not; the file in the repository was made with the
versions that it names under 'versions'. Weights are random and larger than fresh ones, so that
attention is far from uniform.
"""

import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("hugging_face.npz")
COMMON = dict(
    model_type="reformer",
    is_decoder=True,
    hidden_size=16,
    num_attention_heads=2,
    attention_head_size=6,
    feed_forward_size=20,
    vocab_size=12,
    max_position_embeddings=48,
    axial_pos_shape=[6, 8],
    axial_pos_embds_dim=[5, 11],
    hash_seed=3,
    use_cache=False,
)
CONFIGS = {
    # Both kinds of layers, one round, many buckets: the shape of crime-and-punishment.
    "factored": COMMON
    | dict(
        attn_layers=["local", "lsh", "local", "lsh"],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=[2, 4],
        num_hashes=1,
        hidden_act="relu",
    ),
    # Several rounds in a longer cycle, LSH chunks twice the local ones: the shape of enwik8.
    "rounds": COMMON
    | dict(
        attn_layers=["local", "local", "lsh", "local"],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=8,
        num_buckets=4,
        num_hashes=3,
        hidden_act="gelu",
        chunk_size_feed_forward=1,
        layer_norm_eps=1e-5,
    ),
    # Unusual: chunk lengths that do not divide each other, two chunks before, a table of positions.
    "circle": COMMON
    | dict(
        attn_layers=["lsh", "local"],
        local_attn_chunk_length=6,
        lsh_attn_chunk_length=4,
        local_num_chunks_before=2,
        lsh_num_chunks_before=2,
        num_buckets=[2, 2, 2],
        num_hashes=2,
        axial_pos_embds=False,
        hidden_act="gelu_new",
    ),
}
LENGTHS = (1, 5, 8, 24, 35)


def model_of(config: dict, seed: int):
    """A `ReformerModelWithLMHead` whose random weights are about as large as trained ones."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            about_one = name.endswith("layer_norm.weight")
            weight.copy_(torch.randn_like(weight) * 0.3 + about_one)
    return model


def rotations_of(config: dict):
    """The rotations that each LSH layer of the model draws."""
    import torch

    n_buckets = config["num_buckets"]
    total = n_buckets if isinstance(n_buckets, int) else sum(n_buckets)
    torch.manual_seed(config["hash_seed"])
    sizes = (config["num_attention_heads"], config["attention_head_size"], config["num_hashes"])
    return torch.randn(*sizes, total // 2).numpy()


def inputs_of(config: dict, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[3, T]` and their masks: all real, padded at the end, padded at the start."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config["vocab_size"], (3, length))
    real = np.ones((3, length), bool)
    if length > 1:
        real[1, length - length // 3 - 1 :] = False
        real[2, : length // 4] = False
    return tokens, real


def logits_of(model, tokens: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The model's logits without their bias, which depends on the version."""
    import torch

    mask = None if real.all() else torch.tensor(real)
    with torch.no_grad():
        logits = model(torch.tensor(tokens), attention_mask=mask).logits
        if model.lm_head.decoder.bias is not None:
            logits = logits - model.lm_head.decoder.bias
    return logits.numpy()


def main() -> None:
    """Writes the fixture."""
    import torch
    import transformers

    arrays = {}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model = model_of(config, seed)
        state = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
        arrays |= {f"{name}/weights/{key}": array for key, array in state.items()}
        arrays[f"{name}/rotations"] = rotations_of(config)
        for length in LENGTHS:
            tokens, real = inputs_of(config, length, seed=length)
            arrays[f"{name}/{length}/tokens"], arrays[f"{name}/{length}/real"] = tokens, real
            for padded in (False, True):
                logits = logits_of(model, tokens, real if padded else np.ones_like(real))
                arrays[f"{name}/{length}/{'padded' if padded else 'whole'}"] = logits
    arrays["configs"], arrays["versions"] = json.dumps(CONFIGS), json.dumps(versions)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {PATH.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()
