"""What reformax computes beside independent code in PyTorch and in Trax: the rows of docs/peers.md.

A comparison gets the same random inputs on both sides and returns its deviations. PyTorch and the
peers are imported where they run, so that the list of rows needs none of them.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from reformax.layers._trax import signature, tl
from reformax.layers.trax_attention import LSHSelfAttention, SelfAttention
from reformax.ops import (
    block_patterns,
    block_sparse,
    dense,
    linformer,
    local,
    lsh,
    nystromformer,
    performer,
    shared_qk,
)
from tests.layers import test_trax_attention
from tests.ops.inputs import Inputs
from tests.ops.rows import ROWS, Shape
from tests.ops.test_against_oracle import attend_and_differentiate, random_segments
from tests.peers import deepseek

BATCH, LENGTH, N_HEADS, D_HEAD, CHUNK_LEN, N_HASHES = 2, 48, 2, 8, 8, 3
SHAPE = Shape(BATCH, LENGTH, LENGTH, N_HEADS)
CIRCLE = dict(chunk_len=CHUNK_LEN, wrap=True)


class Deviations(NamedTuple):
    """The largest differences, in units of the largest number there or of 1 if that is more.

    Attributes:
      output: of the output.
      gradients: of all gradients; None where the peer has none.
    """

    output: float
    gradients: float | None


class Comparison(NamedTuple):
    """A row.

    Attributes:
      peer: whose code; `subject`: what of it.
      ours: what computes the same here.
      needs: the module that the comparison imports.
      allowed: the largest deviation that passes.
      measure: computes both sides.
    """

    peer: str
    subject: str
    ours: str
    needs: str
    allowed: float
    measure: Callable[[], Deviations]

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.subject}: {self.ours}"

    @property
    def missing(self) -> bool:
        try:
            return importlib.util.find_spec(self.needs) is None
        except ModuleNotFoundError:  # of the package that should have it
            return True


def deviation(got, want) -> float:
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    assert [x.shape for x in got] == [x.shape for x in want]
    assert all(np.isfinite(x).all() for x in (*got, *want))
    scales = [max(1, np.abs(y).max()) for y in want]
    return max(np.abs(x - y).max() / scale for x, y, scale in zip(got, want, scales, strict=True))


def numbers(n: int, seed: int = 0):
    """`n` arrays `[B, T, N, H]`; no entry is near 0, where a gradient of a norm is large."""
    x = np.random.default_rng(seed).normal(size=(n, BATCH, LENGTH, N_HEADS, D_HEAD))
    return (x + 0.2 * np.sign(x)).astype(np.float32)


def ours(op, causal, q, k, v, d_out, segment_ids=None, params=()):
    """`(plan, out, gradients of those of q, k and v that there are)`."""
    run = attend_and_differentiate(op, causal, 0.0)
    x = Inputs(q, None if op.shared_qk else k, v, params=params)
    plan, out, (gradients, _) = run(x, None, segment_ids, jax.random.key(0), d_out)
    return plan, out, [x for x in gradients[:3] if x is not None]


def differentiate(attend, inputs, d_out):
    """`(out, gradients)` of PyTorch code over arrays."""
    import torch

    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, torch.tensor(d_out))
    return out.detach().numpy(), [x.numpy() for x in gradients]


def compared(got, want) -> Deviations:
    return Deviations(deviation(got[0], want[0]), deviation(list(got[1]), list(want[1])))


# PyTorch.


def sdpa(row) -> Deviations:
    """Scaled dot-product attention with the row's mask, or the logarithm of what it counts twice.

    Packed segments with padding. A row that sees nothing is left out: it is NaN there.
    """
    import torch
    from torch.nn import functional as F

    op, causal = row.op(), row.causal()
    q, k, v, d_out = numbers(4)
    segment_ids = random_segments(np.random.default_rng(1), BATCH, LENGTH)
    plan, *got = ours(op, causal, q, k, v, d_out, segment_ids)
    counts = np.broadcast_to(
        row.counts(row.first, plan, SHAPE, causal, segment_ids), (BATCH, N_HEADS, LENGTH, LENGTH)
    )
    sees = counts.any(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        bias = torch.tensor(np.where(sees, np.log(counts), 0).astype(np.float32))

    def attend(q, *rest):
        k, v = rest if len(rest) == 2 else (length_normalized(q), *rest)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=bias)
        return (out * torch.tensor(sees)).transpose(1, 2)

    inputs = (q, v) if op.shared_qk else (q, k, v)
    return compared(got, differentiate(attend, inputs, d_out))


def length_normalized(x):
    import torch

    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def flex(op, mask) -> Deviations:
    """FlexAttention, which has no gradient on a CPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, d_out = numbers(4)
    segment_ids = np.repeat([[1, 2, 3]], [17, 23, 8], axis=1).repeat(BATCH, axis=0)
    packed = torch.tensor(segment_ids)

    def visible(batch, head, query, key):
        same = packed[batch, query] == packed[batch, key]
        return same & (key <= query) & mask(query, key)

    blocks = create_block_mask(visible, BATCH, None, LENGTH, LENGTH, "cpu")
    heads = (torch.tensor(x).transpose(1, 2) for x in (q, k, v))
    want = flex_attention(*heads, block_mask=blocks).transpose(1, 2).numpy()
    _, got, _ = ours(op, True, q, k, v, d_out, segment_ids.astype(np.int32))
    return Deviations(deviation(got, want), None)


def flex_blocks(pattern) -> Deviations:
    """The same over the blocks of a pattern."""
    import torch

    n_blocks = LENGTH // CHUNK_LEN
    table = torch.tensor(np.array(pattern(n_blocks, n_blocks)))
    op = block_sparse.block_sparse(pattern=pattern, block_size=CHUNK_LEN)
    return flex(op, lambda query, key: table[query // CHUNK_LEN, key // CHUNK_LEN])


def near_chunks(query, key):
    return query // CHUNK_LEN - key // CHUNK_LEN <= 1


# Hugging Face, with `q` and `v` side by side as the input, and projections that take them apart.


def hugging_face(kind: str, causal: bool) -> Deviations:
    import torch
    from transformers import ReformerConfig
    from transformers.models.reformer import modeling_reformer

    n_parts, size = (2 if kind == "LSH" else 3), N_HEADS * D_HEAD
    config = ReformerConfig(
        hidden_size=n_parts * size,
        num_attention_heads=N_HEADS,
        attention_head_size=D_HEAD,
        num_hashes=N_HASHES,
        num_buckets=[2, 4],
        hash_seed=5,
        lsh_attn_chunk_length=CHUNK_LEN,
        local_attn_chunk_length=CHUNK_LEN,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
        is_decoder=causal,
    )
    names = ("query_key", "value") if kind == "LSH" else ("query", "key", "value")
    layer = getattr(modeling_reformer, f"{'LSH' if kind == 'LSH' else 'Local'}SelfAttention")(
        config
    )
    with torch.no_grad():
        for name, rows in zip(names, torch.eye(n_parts * size).split(size), strict=True):
            getattr(layer, name).weight.copy_(rows)
    q, k, v, d_out = numbers(4)
    inputs = (q, v) if kind == "LSH" else (q, k, v)

    def attend(*inputs):
        x = torch.cat([x.flatten(2) for x in inputs], dim=-1)
        return layer(x).hidden_states.unflatten(-1, (N_HEADS, D_HEAD))

    want = differentiate(attend, inputs, d_out)
    # The circle shows the last chunk to the first: hidden from it if causal.
    chunks = CIRCLE | dict(n_chunks_before=config.lsh_num_chunks_before)
    if kind == "LSH":
        torch.manual_seed(config.hash_seed)
        rotations = torch.randn(N_HEADS, D_HEAD, N_HASHES, 3).numpy()
        op = circle_of_hashes(chunks, (2, 4), rotations, -1e5)
    else:
        op = local.local(**chunks)
    return compared(ours(op, causal, q, k, v, d_out)[1:], want)


def circle_of_hashes(chunks, n_buckets, rotations, self_score):
    return lsh.lsh(
        **chunks,
        n_hashes=N_HASHES,
        n_buckets=n_buckets,
        count_once=False,
        rotations=rotations,
        self_score=self_score,
    )


# Lucidrains, whose keys have length 1 before the division by sqrt(H): our queries are that shorter.


def by_heads(attend):
    """PyTorch code over `[B * N, T, H]`, over `[B, T, N, H]`."""

    def run(*inputs):
        out = attend(*(x.transpose(1, 2).flatten(0, 1) for x in inputs))
        return out.unflatten(0, (BATCH, N_HEADS)).transpose(1, 2)

    return run


def with_short_queries(op, causal, q, v, d_out):
    scale = np.float32(D_HEAD**-0.5)
    _, out, (dq, dv) = ours(op, causal, q * scale, None, v, d_out)
    return out, [dq * scale, dv]


def lucidrains_lsh(causal: bool) -> Deviations:
    import torch
    from reformer_pytorch import LSHAttention

    q, _, v, d_out = numbers(4)
    layer = LSHAttention(bucket_size=CHUNK_LEN, n_hashes=N_HASHES, causal=causal).eval()
    torch.manual_seed(3)
    n_buckets = LENGTH // CHUNK_LEN
    rotations = torch.randn(1, D_HEAD, N_HASHES, n_buckets // 2).numpy()
    torch.manual_seed(3)
    want = differentiate(by_heads(lambda qk, v: layer(qk, v)[0]), (q, v), d_out)
    op = circle_of_hashes(CIRCLE, n_buckets, np.repeat(rotations, N_HEADS, axis=0), -5e4)
    return compared(with_short_queries(op, causal, q, v, d_out), want)


def lucidrains_full(causal: bool) -> Deviations:
    from reformer_pytorch.reformer_pytorch import FullQKAttention

    q, _, v, d_out = numbers(4)
    layer = FullQKAttention(causal=causal)
    want = differentiate(by_heads(lambda qk, v: layer(qk, v)[0]), (q, v), d_out)
    return compared(with_short_queries(shared_qk.shared_qk(), causal, q, v, d_out), want)


def lucidrains_local(causal: bool) -> Deviations:
    from local_attention import LocalAttention

    q, k, v, d_out = numbers(4)
    after = 0 if causal else 1
    layer = LocalAttention(
        window_size=CHUNK_LEN, causal=causal, look_forward=after, use_rotary_pos_emb=False
    )
    want = differentiate(by_heads(layer), (q, k, v), d_out)
    op = local.local(chunk_len=CHUNK_LEN, n_chunks_after=after)
    return compared(ours(op, causal, q, k, v, d_out)[1:], want)


def lucidrains_linformer() -> Deviations:
    import torch
    from linformer import LinformerSelfAttention

    q, k, v, d_out = numbers(4)
    n_projected, size = 6, N_HEADS * D_HEAD
    layer = LinformerSelfAttention(size, 2 * LENGTH, k=n_projected, heads=N_HEADS)
    # It projects one input: here the three in a row, of which its weights take one each.
    for i, linear in enumerate((layer.to_q, layer.to_k, layer.to_v)):
        linear.weight.data = torch.eye(3 * size)[i * size : (i + 1) * size]
    layer.to_out = torch.nn.Identity()
    weights = [w.detach().numpy() for w in (layer.proj_k, layer.proj_v)]
    want = differentiate(in_a_row(layer), (q, k, v), d_out)
    params = dict(zip("ef", weights, strict=True))
    op = linformer.linformer(n_projected=n_projected)
    return compared(ours(op, False, q, k, v, d_out, params=params)[1:], want)


def lucidrains_nystrom() -> Deviations:
    """An example and a head at a time: its pseudo-inverse begins by what is largest in all."""
    import torch
    from nystrom_attention import NystromAttention

    q, k, v, d_out = numbers(4)
    layer = NystromAttention(
        3 * D_HEAD, dim_head=D_HEAD, heads=1, num_landmarks=CHUNK_LEN, residual_conv_kernel=5
    )
    layer.to_qkv.weight.data = torch.eye(3 * D_HEAD)
    layer.to_out = torch.nn.Identity()
    weights = layer.res_conv.weight.detach().numpy().reshape(1, -1)
    op = nystromformer.nystromformer(n_landmarks=CHUNK_LEN, conv_size=5)
    params = {"conv": np.repeat(weights, N_HEADS, axis=0)}

    def attend(*inputs):
        return torch.cat(
            [layer(torch.cat(x, -1)) for x in zip(*(x.split(1) for x in inputs), strict=True)]
        )

    want = differentiate(by_heads(attend), (q, k, v), d_out)
    return compared(ours(op, False, q, k, v, d_out, params=params)[1:], want)


def lucidrains_performer() -> Deviations:
    import torch
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    q, k, v, d_out = numbers(4)
    options = dict(n_features=32, seed=0, epsilon=1e-12, chunk_len=CHUNK_LEN)
    rng = jax.random.key(options["seed"], impl="threefry2x32")
    directions = performer.orthogonal_directions(rng, options["n_features"], D_HEAD)
    directions = dict(projection_matrix=torch.tensor(np.asarray(directions)), eps=0.0)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        queries = softmax_kernel(q, is_query=True, **directions)
        keys = softmax_kernel(k, is_query=False, **directions)
        return linear_attention(queries, keys, v).transpose(1, 2)

    want = differentiate(attend, (q, k, v), d_out)
    return compared(ours(performer.performer(**options), False, q, k, v, d_out)[1:], want)


def in_a_row(layer):
    """`layer` of queries, keys and values as one input, all heads side by side."""
    import torch

    def run(*inputs):
        out = layer(torch.cat([x.flatten(2) for x in inputs], -1))
        return out.unflatten(-1, (N_HEADS, D_HEAD))

    return run


# DeepSeek, GLM and Qwen, of `tests.peers.deepseek`.


def indexed(side, name: str) -> Deviations:
    return compared(*side(name))


# Trax.


def trax(layer, its, options) -> Deviations:
    """Output and gradients, of the input and all weights, of the layers of the same name."""
    mine, theirs = (kind(**test_trax_attention.SIZES, **options) for kind in (layer, its))
    for one, seed in ((theirs, 1), (mine, 2)):
        one.init(signature(test_trax_attention.X), rng=jax.random.PRNGKey(seed))
    mine.weights, mine.state = theirs.weights, theirs.state
    rows = np.ones(test_trax_attention.X.shape[:2], bool)
    got, want = (test_trax_attention.run(one, None, rows) for one in (mine, theirs))
    return compared((got[0][0], got[1]), (want[0][0], want[1]))


# The rows: the peer and its module, what of it, what computes the same here, and both together.


def rows_of_torch():
    for row in (row for row in ROWS if row.counts):
        measure = functools.partial(sdpa, row)
        yield "SDPA", "torch", f"the mask of `{row.name}`", row.factory.__name__, measure
    window = local.local(chunk_len=CHUNK_LEN, n_chunks_before=2, window=11)
    for subject, op, mask in (
        ("causal", dense.dense(), lambda query, key: key <= query),
        ("own and previous chunk", local.local(chunk_len=CHUNK_LEN), near_chunks),
        ("a window", window, lambda query, key: query - key < 11),
    ):
        measure = functools.partial(flex, op, mask)
        yield "FlexAttention", "torch", f"{subject}, packed", op.name, measure
    blocks = functools.partial(flex_blocks, block_patterns.butterfly())
    yield "FlexAttention", "torch", "butterfly blocks, packed", "block_sparse", blocks


def rows_of_reformers():
    for causal, said in ((True, "causal"), (False, "both ways")):
        for module, subject, name, measure in (
            ("transformers", "LSH", "lsh", functools.partial(hugging_face, "LSH")),
            ("transformers", "local", "local", functools.partial(hugging_face, "Local")),
            ("reformer_pytorch", "LSH", "lsh", lucidrains_lsh),
            ("reformer_pytorch", "full", "shared_qk", lucidrains_full),
            ("local_attention", "local", "local", lucidrains_local),
        ):
            both = functools.partial(measure, causal=causal)
            yield module, module, f"{subject}, {said}", name, both


def rows_of_low_rank():
    for module, name, measure in (
        ("linformer", "linformer", lucidrains_linformer),
        ("nystrom_attention", "nystromformer", lucidrains_nystrom),
        ("performer_pytorch", "performer", lucidrains_performer),
    ):
        yield module, module, "both ways", name, measure


def rows_of_indexers():
    for subject, name, side, which in (
        ("DeepSeek V3.2", "dsa", deepseek.mla, "deepseek_v32"),
        ("GLM 5", "dsa", deepseek.mla, "glm_moe_dsa"),
        ("QSA of Qwen 4", "dsa", deepseek.qwen, "qwen4_exp"),
        ("CSA of DeepSeek V4", "csa", deepseek.v4, "csa"),
        ("HCA of DeepSeek V4", "hca", deepseek.v4, "hca"),
    ):
        needs = f"transformers.models.{which if name == 'dsa' else 'deepseek_v4'}"
        yield "transformers, indexed", needs, subject, name, functools.partial(indexed, side, which)


def rows_of_trax():
    for layer, its, options in (
        (SelfAttention, tl.SelfAttention, dict(causal=True, bias=True)),
        (SelfAttention, tl.SelfAttention, dict(share_qk=True)),
        (SelfAttention, tl.SelfAttention, dict(chunk_len=8, n_chunks_before=1, n_chunks_after=1)),
        (LSHSelfAttention, tl.LSHSelfAttention, dict(chunk_len=8, n_hashes=3, n_buckets=[4, 2])),
        (LSHSelfAttention, tl.LSHSelfAttention, dict(chunk_len=8, n_buckets=4, causal=True)),
    ):
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        both = functools.partial(trax, layer, its, options)
        yield "Trax", "trax", f"`{layer.__name__}({said})`", layer.__name__, both


ALLOWED = {
    "reformer_pytorch": 5e-5,  # no 1e-6 below the root that normalizes its keys
    "nystrom_attention": 5e-5,  # its pseudo-inverse multiplies what rounding leaves
}
COMPARISONS = tuple(
    Comparison(peer, subject, f"`{name}`", module, ALLOWED.get(module, 3e-6), measure)
    for peer, module, subject, name, measure in (
        *rows_of_torch(),
        *rows_of_reformers(),
        *rows_of_low_rank(),
        *rows_of_indexers(),
        *rows_of_trax(),
    )
)
