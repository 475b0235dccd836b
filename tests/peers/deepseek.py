"""Indexed and compressed attention of Hugging Face's transformers, and the same computed here.

Projections of theirs take parts of one input, so that the attention alone is compared. Both sides
get the same random numbers in float32, and return `(out, gradients)`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from reformax.ops import csa, dsa, hca
from reformax.ops.indexing.indexer import Indexer

BATCH, LENGTH, N_HEADS, SIZE, N_INDEX = 2, 50, 2, 8, 16
THETA = 100.0


def drawn(rng, *shape, scale=1.0):
    return (scale * rng.normal(size=shape)).astype(np.float32)


def halves_first(size: int, n_rotated: int) -> np.ndarray:
    """Our order, pairs (i, i + n / 2) first, of features with pairs side by side at the end."""
    rotated = np.arange(size - n_rotated, size)
    return np.concatenate([rotated[::2], rotated[1::2], np.arange(size - n_rotated)])


def run_torch(attend, inputs, weights, d_out):
    """`attend(x)`'s output, and the gradients of the inputs, side by side in x, and of weights."""
    import torch

    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    one = torch.ones(*leaves[0].shape[:2], 1)
    out = attend(torch.cat([*(x.flatten(2) for x in leaves), one], dim=-1)).view(d_out.shape)
    gradients = torch.autograd.grad(out, [*leaves, *weights], torch.tensor(d_out))
    return out.detach().numpy(), [x.numpy() for x in gradients]


class Columns:
    """Where each input is in the input of a layer, whose last feature is 1."""

    def __init__(self, **sizes: int):
        ends = np.cumsum(list(sizes.values()))
        self.starts = dict(zip(sizes, ends - list(sizes.values()), strict=True))
        self.sizes, self.n = sizes, int(ends[-1]) + 1

    def taking(self, name: str) -> np.ndarray:
        """The matrix `[size, n]` that takes an input."""
        start, size = self.starts[name], self.sizes[name]
        return np.eye(self.n, dtype=np.float32)[start : start + size]


def assign(module, **weights):
    """Sets weights, by names with `__` for dots; None makes a norm the identity."""
    import torch

    for name, value in weights.items():
        *path, last = name.split("__")
        owner = module
        for part in path:
            owner = getattr(owner, part)
        if value is None:
            setattr(owner, last, torch.nn.Identity())
            continue
        parameter = getattr(owner, last)
        parameter = getattr(parameter, "weight", parameter)
        assert parameter.shape == value.shape, name
        with torch.no_grad():
            parameter.copy_(torch.tensor(value))


def v4(kind: str):
    """Layers of DeepSeek V4: "csa" or "hca". Rotations are of half of a head's features."""
    import torch
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    rng, n_rotated, d_index, n_series = np.random.default_rng(0), 4, 6, 2 if kind == "csa" else 1
    size = {"csa": 4, "hca": 8}[kind]
    columns = Columns(q=N_HEADS * SIZE, kv=SIZE, summary=n_series * SIZE, gate=n_series * SIZE)
    config = DeepseekV4Config(
        hidden_size=columns.n,
        num_hidden_layers=1,
        num_attention_heads=N_HEADS,
        head_dim=SIZE,
        q_lora_rank=N_HEADS * SIZE,
        partial_rotary_factor=n_rotated / SIZE,
        compress_rope_theta=THETA,
        layer_types=[
            {"csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}[kind]
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=8,
        o_groups=1,
        o_lora_rank=N_HEADS * SIZE,
        index_n_heads=N_INDEX,
        index_head_dim=d_index,
        index_topk=3,
    )
    config._attn_implementation = "eager"
    layer = theirs.DeepseekV4Attention(config, 0).eval()
    q, kv, d_out = (drawn(rng, BATCH, LENGTH, n, SIZE) for n in (N_HEADS, 1, N_HEADS))
    series = [drawn(rng, BATCH, LENGTH, n_series, SIZE) for _ in range(2)]
    positions, norm = drawn(rng, size, n_series, SIZE), 1 + drawn(rng, SIZE, scale=0.2)
    sinks = drawn(rng, N_HEADS)
    taken = np.eye(N_HEADS * SIZE, dtype=np.float32)
    assign(
        layer,
        **dict(q_a_proj=columns.taking("q"), q_a_norm=None, q_b_proj=taken, q_b_norm=None),
        **dict(kv_proj=columns.taking("kv"), kv_norm=None, o_a_proj=taken, sinks=sinks),
        o_b_proj=np.eye(columns.n, N_HEADS * SIZE, dtype=np.float32),
        compressor__kv_proj=columns.taking("summary"),
        compressor__gate_proj=columns.taking("gate"),
        compressor__position_bias=positions.reshape(size, -1),
        compressor__kv_norm=norm,
    )
    our_order, index = halves_first(SIZE, n_rotated), {}
    if kind == "csa":
        query = drawn(rng, N_INDEX, d_index, N_HEADS * SIZE)
        weight = drawn(rng, N_INDEX, N_HEADS * SIZE, scale=0.3)
        key, gate = drawn(rng, 2, 2, d_index, SIZE)
        index_positions, index_norm = drawn(rng, size, 2, d_index), drawn(rng, d_index)
        ones = np.eye(columns.n, dtype=np.float32)[-1]
        assign(
            layer.compressor.indexer,
            q_b_proj=query.reshape(-1, N_HEADS * SIZE),
            kv_proj=key.reshape(-1, SIZE) @ columns.taking("kv"),
            gate_proj=gate.reshape(-1, SIZE) @ columns.taking("kv"),
            position_bias=index_positions.reshape(size, -1),
            kv_norm=index_norm,
            scorer__weights_proj=weight @ columns.taking("q") + ones,
        )
        of_index = halves_first(d_index, n_rotated)
        of_heads = (N_INDEX, -1, N_HEADS, SIZE)
        index = dict(
            query=query.reshape(of_heads)[:, of_index][..., our_order].transpose(2, 3, 0, 1),
            weight=weight.reshape(N_INDEX, N_HEADS, SIZE)[..., our_order].transpose(1, 2, 0),
            key=key[:, of_index][..., our_order].transpose(2, 0, 1)[None],
            gate=gate[:, of_index][..., our_order].transpose(2, 0, 1)[None],
            positions=index_positions[..., of_index],
            norm=index_norm[of_index],
        )

    position = torch.arange(LENGTH).expand(BATCH, -1)
    angles = theirs.DeepseekV4RotaryEmbedding(config)
    distance = position[0][:, None] - position[0]
    mask = torch.where((distance >= 0) & (distance < 8), 0.0, -torch.inf)[None, None]

    def attend(x):
        embeddings = {"compress": angles(x, position_ids=position, layer_type="compress")}
        return layer(x, embeddings, position, mask.expand(BATCH, -1, -1, -1))[0][..., :-1][
            ..., : N_HEADS * SIZE
        ]

    weights = layer.sinks, layer.compressor.position_bias, layer.compressor.kv_norm.weight
    out, (d_q, d_kv, d_summary, d_gate, d_sinks, d_positions, d_norm) = run_torch(
        attend, (q, kv, *series), weights, d_out
    )
    want = out, (d_q, d_kv, d_summary, d_gate, d_positions.reshape(positions.shape), d_norm)
    want = jax.tree.map(lambda x: x[..., our_order], want)

    options = dict(block_size=size, window=8, share_kv=True)
    options |= dict(rotary_features=n_rotated, rotary_base=THETA)
    op = hca.hca(**options)
    if kind == "csa":
        indexer = dict(top_k=3, n_index_heads=N_INDEX, d_index=d_index, index_loss=0.0)
        op = csa.csa(**options, **indexer)
    ours = [x[..., our_order] for x in (q, kv, *series, positions, norm)]

    def ours_of(q, kv, summary, gate, positions, norm, sinks):
        params = dict(sinks=sinks, kv=dict(positions=positions, norm=norm))
        params |= {"index": index} if index else {}
        extra = {"summary_kv": summary, "gate_kv": gate}
        return op(q, kv, kv, causal=True, params=params, extra_projections=extra)

    found, vjp = jax.vjp(jax.jit(ours_of), *ours, sinks)
    *gradients, d_our_sinks = vjp(jnp.asarray(d_out[..., our_order]))
    return (found, (gradients, d_our_sinks)), (want[0], (list(want[1]), d_sinks))


def mla(module: str):
    """Layers of DeepSeek V3.2 and GLM: heads have an unrotated part, which the indexer reads."""
    import importlib

    import torch

    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[module]
    theirs = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    make = getattr(importlib.import_module("transformers"), f"{name}Config")
    rng, n_rotated, top_k = np.random.default_rng(0), 4, 7
    plain = SIZE
    columns = Columns(
        q=N_HEADS * (plain + n_rotated), k=N_HEADS * plain, v=N_HEADS * SIZE, k_rotated=n_rotated
    )
    latent = N_HEADS * (plain + SIZE)
    config = make(
        hidden_size=columns.n,
        num_hidden_layers=1,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_HEADS,
        q_lora_rank=columns.sizes["q"],
        kv_lora_rank=latent,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=n_rotated,
        v_head_dim=SIZE,
        index_n_heads=N_INDEX,
        index_head_dim=n_rotated,
        index_topk=top_k,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    config._attn_implementation = "eager"
    layer = getattr(theirs, f"{name}Attention")(config, 0).eval()
    angles = getattr(theirs, f"{name}RotaryEmbedding")(config)
    q = drawn(rng, BATCH, LENGTH, N_HEADS, plain + n_rotated)
    k, v, d_out = (drawn(rng, BATCH, LENGTH, N_HEADS, SIZE) for _ in range(3))
    k_rotated = drawn(rng, BATCH, LENGTH, 1, n_rotated)
    query = drawn(rng, N_INDEX, n_rotated, N_HEADS, plain)
    key, weight = drawn(rng, n_rotated, N_HEADS, plain), drawn(rng, N_INDEX, N_HEADS, plain)
    weight = 0.2 * weight

    def of_plain_q(x):  # [..., N, plain] to all features of q
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n_rotated)])
        return x.reshape(-1, columns.sizes["q"])

    # A head's key and value are side by side in the product of the latent vector.
    both = np.eye(latent, dtype=np.float32).reshape(2, N_HEADS, SIZE, latent)
    ones = np.eye(columns.n, dtype=np.float32)[-1]
    assign(
        layer,
        **dict(q_a_proj=columns.taking("q"), q_a_layernorm=None, kv_a_layernorm=None),
        q_b_proj=np.eye(columns.sizes["q"], dtype=np.float32),
        kv_a_proj_with_mqa=np.concatenate([columns.taking(x) for x in ("k", "v", "k_rotated")]),
        kv_b_proj=both.transpose(1, 0, 2, 3).reshape(latent, latent),
        o_proj=np.eye(columns.n, N_HEADS * SIZE, dtype=np.float32),
        indexer__wq_b=of_plain_q(query),
        indexer__wk=key.reshape(n_rotated, -1) @ columns.taking("k"),
        indexer__k_norm=None,
        indexer__weights_proj=of_plain_q(weight) @ columns.taking("q") + ones,
    )
    position = torch.arange(LENGTH)[None].expand(BATCH, -1)
    mask = torch.where(position[0][:, None] >= position[0], 0.0, -torch.inf)[None, None]

    def attend(x):
        out = layer(
            x,
            position_embeddings=angles(x, position_ids=position),
            attention_mask=mask.expand(BATCH, -1, -1, -1),
            position_ids=position,
        )[0]
        return out[..., : N_HEADS * SIZE]

    want = run_torch(attend, (q, k, v, k_rotated), (), d_out)

    op = dsa.dsa(
        top_k=top_k,
        n_index_heads=N_INDEX,
        d_index=n_rotated,
        index_loss=0.0,
        indexer=Indexer(rotary=True),
        impl="xla",
    )
    pairs = halves_first(n_rotated, n_rotated)
    of_index = pairs if module == "glm_moe_dsa" else slice(None)
    query, key = query[:, of_index], key[of_index]
    unrotated = [(0, 0), (0, n_rotated)]
    params = dict(
        query=np.pad(query.transpose(2, 3, 0, 1), [*unrotated, (0, 0), (0, 0)]),
        key=np.pad(key.transpose(1, 2, 0), [*unrotated, (0, 0)]),
        weight=np.pad(weight.transpose(1, 2, 0), [*unrotated, (0, 0)]),
    )

    def ours_of(q, k, v, k_rotated):
        from reformax.ops.numerics.rotary import rotary

        turned = [rotary(x[..., pairs]) for x in (q[..., plain:], k_rotated)]
        q = jnp.concatenate([q[..., :plain], turned[0]], axis=-1)
        turned[1] = jnp.broadcast_to(turned[1], (*k.shape[:3], n_rotated))
        k = jnp.concatenate([k, turned[1]], axis=-1)
        return op(q, k, v, causal=True, params=params)

    found, vjp = jax.vjp(jax.jit(ours_of), q, k, v, k_rotated)
    return (found, vjp(jnp.asarray(d_out))), want


def qwen(module: str):
    """A layer of Qwen's sparse attention (QSA), of grouped heads that are rotated in part."""
    import importlib

    import torch
    from transformers import Qwen4ExpTextConfig

    theirs = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    rng, n_rotated, top_k, block, n_kv = np.random.default_rng(0), 4, 12, 4, 1
    plain, size = SIZE, SIZE + n_rotated
    columns = Columns(q=N_HEADS * size, k=n_kv * size, v=n_kv * size)
    config = Qwen4ExpTextConfig(
        hidden_size=columns.n,
        num_hidden_layers=1,
        num_attention_heads=N_HEADS,
        num_key_value_heads=n_kv,
        head_dim=size,
        indexer_n_heads=N_INDEX,
        indexer_kv_heads=1,
        indexer_head_dim=n_rotated,
        indexer_budget=top_k,
        indexer_compress_ratio=block,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": n_rotated / size,
        },
    )
    config._attn_implementation = "eager"
    layer = theirs.Qwen4ExpTextAttention(config, 0).eval()
    q, k, v, d_out = (drawn(rng, BATCH, LENGTH, n, size) for n in (N_HEADS, n_kv, n_kv, N_HEADS))
    query = drawn(rng, N_INDEX, n_rotated, N_HEADS, plain)
    key = drawn(rng, n_rotated, plain)

    def of_plain(x):  # of the features that are not rotated, the last ones of a head
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(n_rotated, 0)])

    heads = columns.taking("q").reshape(N_HEADS, size, columns.n)
    index_queries = of_plain(query).reshape(-1, N_HEADS * size) @ columns.taking("q")
    assign(
        layer,
        **dict(q_norm=None, k_norm=None, indexer__q_layernorm=None, indexer__k_layernorm=None),
        # A head's query and gate are side by side; of gates of 0 the sigmoid is a half.
        q_proj=np.concatenate([heads, 0 * heads], axis=1).reshape(-1, columns.n),
        **dict(k_proj=columns.taking("k"), v_proj=columns.taking("v")),
        o_proj=2 * np.eye(columns.n, N_HEADS * size, dtype=np.float32),
        indexer__index_qk_proj=np.concatenate([index_queries, of_plain(key) @ columns.taking("k")]),
    )
    position = torch.arange(LENGTH)[None].expand(BATCH, -1)
    angles = theirs.Qwen4ExpTextRotaryEmbedding(config)
    mask = torch.where(position[0][:, None] >= position[0], 0.0, -torch.inf)[None, None]

    def attend(x):
        embeddings = angles(x, position[None])
        out = layer(x, embeddings, mask.expand(BATCH, -1, -1, -1))[0]
        return out[..., : N_HEADS * size]

    want = run_torch(attend, (q, k, v), (), d_out)

    op = dsa.dsa(
        top_k=top_k,
        n_index_heads=N_INDEX,
        d_index=n_rotated,
        index_loss=0.0,
        indexer=Indexer(rotary=True, block_size=block),
    )
    key = np.stack([of_plain(key).T, *[np.zeros((size, n_rotated))] * (N_HEADS - 1)])
    params = dict(
        query=of_plain(query).transpose(2, 3, 0, 1),
        key=key.astype(np.float32),  # the heads of a group have one key
        weight=np.zeros((N_HEADS, size, N_INDEX), np.float32),
    )

    def ours_of(q, k, v):
        from reformax.ops.numerics.rotary import rotary

        q, k = (
            jnp.concatenate([rotary(x[..., :n_rotated]), x[..., n_rotated:]], axis=-1)
            for x in (q, k)
        )
        return op(q, k, v, causal=True, params=params)

    found, vjp = jax.vjp(jax.jit(ours_of), q, k, v)
    return (found, vjp(jnp.asarray(d_out))), want
