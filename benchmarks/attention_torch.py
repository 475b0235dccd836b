"""The rows of `benchmarks.attention` that are PyTorch's, in a process of their own.

    python -m benchmarks.attention --peers

starts it: two frameworks in one process would share CUDA libraries of which each wants its own
version. It reads a shape a line from stdin, as JSON, and answers each with a line of JSON for every
row, as soon as it is known, and an empty object behind the last. It needs none of reformax.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from benchmarks.measuring import reason, time_calls

MIB = 2**20


class Peer(NamedTuple):
    """An attention with its inputs, the leaves of its gradient: `attend(*inputs)`."""

    attend: Callable[..., Any]
    inputs: tuple[Any, ...]


def leaves(n: int, *size: int, dtype: str) -> tuple[Any, ...]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = dict(device=device, dtype=getattr(torch, dtype), requires_grad=True)
    return tuple(torch.randn(size, **options) for _ in range(n))


def flex(batch, length, n_heads, d_head, chunk_len, dtype) -> Peer:
    """FlexAttention, compiled, over the blocks of local attention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def own_and_previous_chunk(batch, head, query, key):
        return (key <= query) & (query // chunk_len - key // chunk_len <= 1)

    inputs = leaves(3, batch, n_heads, length, d_head, dtype=dtype)
    mask = create_block_mask(
        own_and_previous_chunk, None, None, length, length, inputs[0].device, BLOCK_SIZE=chunk_len
    )
    # Whole or not at all: a graph that breaks would run uncompiled.
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
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
    """What makes each peer, by its name in the table."""
    return {
        "torch FlexAttention, local": (flex, {}),
        "reformer_pytorch, LSH, 1 hash": (lucidrains, dict(n_hashes=1)),
        "reformer_pytorch, LSH, 4 hashes": (lucidrains, dict(n_hashes=4)),
        "transformers, LSH, 4 hashes, with projections": (hugging_face, dict(n_hashes=4)),
    }


def measure(peer: Peer, repeats: int) -> dict[str, Any]:
    """Times of both passes and, on a GPU, what the gradient allocates at its peak."""
    import torch

    on_gpu = peer.inputs[0].is_cuda

    def wait(_):
        if on_gpu:
            torch.cuda.synchronize()

    def forward():
        with torch.no_grad():
            return peer.attend(*peer.inputs)

    d_out = torch.randn_like(forward())

    def gradient():
        return torch.autograd.grad(peer.attend(*peer.inputs), peer.inputs, d_out)

    result = {"forward": time_calls(forward, wait, repeats)}
    result["gradient"] = time_calls(gradient, wait, repeats)
    result["temp_mib"] = None
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = gradient()
        kept = sum(x.numel() * x.element_size() for x in results)
        peak = torch.cuda.max_memory_allocated() - before
        result["temp_mib"] = (peak - kept) / MIB
    return result


def answer(shape: dict[str, Any], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one shape; one that fails has its error."""
    for name, (build, options) in rows().items():
        try:
            yield {"name": name, **measure(build(**shape, **options), repeats)}
        except Exception as error:  # of any kind: the table has it, and the other rows
            traceback.print_exc()  # to stderr: the table has one line of it
            yield {"name": name, "error": reason(error)}
        forget()


def forget() -> None:
    """Gives memory back, and compiled code, of which there is a limit to each function's kinds."""
    try:
        import torch
    except ImportError:
        return
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def answers_alone() -> Iterator[TextIO]:
    """What stdout was, for answers alone; whatever the libraries print goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers


def main() -> None:
    with answers_alone() as answers:
        for line in sys.stdin:
            request = json.loads(line)
            for row in (*answer(request["shape"], request["repeats"]), {}):
                print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main()
