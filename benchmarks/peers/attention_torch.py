"""The rows of `benchmarks.attention` that are PyTorch's, in a process that it starts.

A request has a shape; each row is an answer, as soon as it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.failures import attempt, reason
from benchmarks.harness.processes import serve
from benchmarks.peers.torch_calls import Peer, flex_attention, leaves, measure


def flex(batch, length, n_heads, d_head, chunk_len, dtype) -> Peer:
    """FlexAttention over the blocks of local attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def own_and_previous_chunk(batch, head, query, key):
        return (key <= query) & (query // chunk_len - key // chunk_len <= 1)

    inputs = leaves(3, batch, n_heads, length, d_head, dtype=dtype)
    mask = create_block_mask(
        own_and_previous_chunk, None, None, length, length, inputs[0].device, BLOCK_SIZE=chunk_len
    )
    compiled = flex_attention()
    return Peer(lambda q, k, v: compiled(q, k, v, block_mask=mask), inputs)


def lucidrains(batch, length, n_heads, d_head, chunk_len, dtype, *, n_hashes) -> Peer:
    """LSH attention of reformer_pytorch."""
    from reformer_pytorch import LSHAttention

    inputs = leaves(2, batch * n_heads, length, d_head, dtype=dtype)
    layer = LSHAttention(bucket_size=chunk_len, n_hashes=n_hashes, causal=True)
    layer = layer.to(inputs[0].device)
    return Peer(lambda qk, v: layer(qk, v)[0], inputs)


def hugging_face(batch, length, n_heads, d_head, chunk_len, dtype, *, n_hashes) -> Peer:
    """LSH attention of transformers, whose layer projects its input itself."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    (x,) = leaves(1, batch, length, n_heads * d_head, dtype=dtype)
    config = ReformerConfig(
        hidden_size=n_heads * d_head,
        num_attention_heads=n_heads,
        attention_head_size=d_head,
        num_hashes=n_hashes,
        num_buckets=None,
        lsh_attn_chunk_length=chunk_len,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config).to(x.device, x.dtype)
    return Peer(lambda x: layer(x).hidden_states, (x,))


def rows() -> dict[str, tuple[Callable[..., Peer], dict[str, int]]]:
    """The constructor of each peer and its options, by the name in the table."""
    return {
        "torch FlexAttention, local": (flex, {}),
        "reformer_pytorch, LSH, 1 hash": (lucidrains, dict(n_hashes=1)),
        "reformer_pytorch, LSH, 4 hashes": (lucidrains, dict(n_hashes=4)),
        "transformers, LSH, 4 hashes, with projections": (hugging_face, dict(n_hashes=4)),
    }


def answer(shape: dict[str, Any], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one shape; one that fails has its error."""
    for name, (build, options) in rows().items():
        known = attempt(lambda b=build, o=options: measure(b(**shape, **o), repeats))
        yield {"name": name} | ({"error": reason(known)} if isinstance(known, Exception) else known)
        forget()


def forget() -> None:
    """Gives memory back, and compiled code: a function can be compiled only a few times."""
    try:
        import torch
    except ImportError:
        return
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(answer)
