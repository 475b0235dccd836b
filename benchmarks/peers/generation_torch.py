"""Hugging Face's Reformer for `benchmarks.generation`, in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.torch_calls import device


def config(
    sizes: Any, positions: dict[str, Any], buckets: Sequence[int], vocab_size: int
) -> dict[str, Any]:
    """The arguments of `ReformerConfig` for a model of reformax.

    Args:
      sizes: `benchmarks.harness.language_models.Sizes`.
      positions: its arguments of axial positions.
      buckets: how many buckets each hash has.
      vocab_size: the number of tokens.
    """
    rows, columns = positions["pos_axial_shape"]
    return dict(
        attn_layers=list(sizes.cycle) * (sizes.n_layers // len(sizes.cycle)),
        attention_head_size=sizes.d_head,
        num_attention_heads=sizes.n_heads,
        hidden_size=sizes.d_model,
        feed_forward_size=sizes.d_ff,
        axial_pos_embds_dim=positions["pos_d_axial_embs"],
        axial_pos_shape=(rows, columns),
        max_position_embeddings=rows * columns,
        local_attn_chunk_length=sizes.local_chunk_len,
        lsh_attn_chunk_length=sizes.lsh_chunk_len,
        num_hashes=sizes.n_hashes,
        num_buckets=list(buckets),
        vocab_size=vocab_size,
        is_decoder=True,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )


def generator(
    config: dict[str, Any], dtype: str, prompts: np.ndarray, by_hand: bool
) -> Callable[[int], Any]:
    """Generation of a number of new tokens, by `generate` or by a loop around the cache."""
    import torch
    import transformers

    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**config))
    model = model.to(device(), getattr(torch, dtype)).eval()
    text = torch.as_tensor(prompts, dtype=torch.long, device=device())

    @torch.inference_mode()
    def generate(n: int) -> torch.Tensor:
        if not by_hand:
            out = model.generate(
                text, max_new_tokens=n, min_new_tokens=n, use_cache=True, do_sample=True, top_k=0
            )
            assert out.shape[1] == text.shape[1] + n
            return out.cpu()
        out = model(text, use_cache=True)
        for _ in range(n - 1):
            drawn = torch.multinomial(torch.softmax(out.logits[:, -1].float(), dim=-1), 1)
            cache = out.past_buckets_states
            out = model(drawn, past_buckets_states=cache, use_cache=True)
        return out.logits.cpu()

    return generate
