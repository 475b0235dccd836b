"""Tokens a second of cached generation, and of the alternatives.

    python -m benchmarks.generation

On a CPU: a model of the quickstart's size at 4,096 tokens of context, a step of decoding against
the forward pass over all tokens that would give the same token without a cache. On a GPU: the
Reformer paper's 12-layer enwik8 model at 16,384 tokens of context against Hugging Face's
ReformerModelWithLMHead of the same sizes, in the same process, where `transformers` and PyTorch are
installed.

    python -m benchmarks.generation --prompt_len=1048576 --mesh=context=4

reads one long prompt in pieces with the sizes of `transformer_text_64k_37m.gin`, whose every fourth
layer sees all earlier positions; 4 devices divide its caches of 6.0 GiB by position.

    python -m benchmarks.generation --prompt_len=131072 --far "dsa" "dsa, hashed" csa

has other attentions in the fourth layers, which read the prompt as a whole, each after a first time
that compiles.

Weights are random, which changes no time. A rate is of all new tokens but the first, which reading
the prompt gives: the time of many new tokens less the time of few, after both have run once.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.harness import command_line, language_models
from benchmarks.harness.calls import attempt, in_turn
from benchmarks.harness.language_models import PAPER, QUICKSTART, TINY, VOCAB_SIZE
from benchmarks.harness.output import Table
from reformax import generation, models
from reformax.declared import SettingError
from reformax.ops import AttentionOp, csa, dsa, hca, local, shared_qk
from reformax.ops.hashing import angular as hashing
from reformax.ops.indexing import candidates
from reformax.ops.indexing.indexer import Indexer
from reformax.training import mesh as mesh_lib

# The two kinds of LSH attention, the last of which is compared with peers.
LSH = {"strictly causal": dict(strictly_causal=True), "ordinary": {}}
# What a peer computes in, and whether a loop of ours around its cache generates.
PEERS = {
    "bfloat16, generate": ("bfloat16", False),
    "float32, generate": ("float32", False),
    "float32, its cache by hand": ("float32", True),
}
PEER_NEW = 34  # new tokens of a peer


# A cycle of windows and of attention to all earlier positions, by size.
LONG = {
    "tiny": dict(d_model=16, d_ff=32, n_heads=2, n_layers=4, window=8, piece=32, n_new=4),
    "cpu": dict(d_model=512, d_ff=1344, n_heads=8, n_layers=12, window=1024, piece=4096, n_new=16),
}
LONG["gpu"] = LONG["cpu"] | dict(piece=65_536, n_new=64)
DENSE = "dense"
# What the fourth layers are, for a number of chosen keys, of a fourth of the key heads.
FAR: dict[str, Callable[[int], AttentionOp]] = {
    DENSE: lambda n: shared_qk.shared_qk(attend_self_if_alone=False),
    "dsa": lambda n: dsa.dsa(top_k=n),
    "dsa, blocks": lambda n: dsa.dsa(top_k=n, indexer=Indexer(block_size=64)),
    "dsa, hashed": lambda n: dsa.dsa(top_k=n, indexer=Indexer(candidates=candidates.Hashed())),
    "dsa, pooled": lambda n: dsa.dsa(top_k=n, indexer=Indexer(candidates=candidates.Pooled())),
    "csa": lambda n: csa.csa(top_k=n, window=128),
    "hca": lambda n: hca.hca(),
}
N_CHOSEN = 512


class Shape(NamedTuple):
    """A model, and the length of its texts."""

    context: int  # prompt and new tokens together
    n_new: int
    sizes: language_models.Sizes
    batches: tuple[int, ...] = (1,)
    dtype: str = "float32"
    axial: bool = False  # otherwise positions are rotary


SHAPES = {
    "tiny": Shape(64, 9, TINY),
    "cpu": Shape(4096, 256, QUICKSTART),
    "gpu": Shape(16_384, 256, PAPER, (1, 8), "bfloat16", axial=True),
}


def reformer(shape: Shape, **lsh_options: Any) -> tuple[models.LanguageModel, Any]:
    """The model for evaluation and its weights."""
    sizes = shape.sizes
    model = models.ReformerLM(
        **sizes.arguments(),
        **(sizes.axial(shape.context) if shape.axial else {}),
        attention_type=sizes.attention(**lsh_options),
        dtype=shape.dtype,
        mode="eval",
    )
    params = jax.jit(lambda key: model.init_params(key, (1, shape.context)))(jax.random.PRNGKey(0))
    return model, params


def prompts(shape: Shape, batch: int) -> np.ndarray:
    """Random bytes that the new tokens follow up to the end of the context."""
    size = (batch, shape.context - shape.n_new)
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, size, np.int32)


def rate(
    generate: Callable[[int], Any], few: int, many: int, repeats: int, **others: Callable[[], Any]
) -> list[float]:
    """Seconds of a step, of the prompt and the first tokens, and of other functions."""
    functions = {n: functools.partial(generate, n) for n in (few, many)} | others
    start, end, *rest = in_turn(functions, repeats).values()
    return [(end - start) / (many - few), start, *rest]


def ours(shape: Shape, batch: int, model, params, repeats: int) -> list[float]:
    """Our times, without peers also that of the forward pass."""
    text = prompts(shape, batch)
    generate = functools.partial(generation.generate, model, params, text, max_length=shape.context)
    others = {} if shape.axial else {"forward": forward(shape, model, params)}
    return rate(generate, 1, shape.n_new, repeats, **others)


def theirs(shape: Shape, batch: int, dtype: str, by_hand: bool) -> list[float]:
    """Hugging Face's times: of its `generate`, or of its cache in a loop of our own."""
    import torch
    import transformers

    sizes, positions = shape.sizes, shape.sizes.axial(shape.context)
    config = transformers.ReformerConfig(
        attn_layers=list(sizes.cycle) * (sizes.n_layers // len(sizes.cycle)),
        attention_head_size=sizes.d_head,
        num_attention_heads=sizes.n_heads,
        hidden_size=sizes.d_model,
        feed_forward_size=sizes.d_ff,
        axial_pos_embds_dim=positions["pos_d_axial_embs"],
        axial_pos_shape=positions["pos_axial_shape"],
        max_position_embeddings=math.prod(positions["pos_axial_shape"]),
        local_attn_chunk_length=sizes.local_chunk_len,
        lsh_attn_chunk_length=sizes.lsh_chunk_len,
        num_hashes=sizes.n_hashes,
        num_buckets=list(hashing.auto_buckets(shape.context, sizes.lsh_chunk_len)),
        vocab_size=VOCAB_SIZE,
        is_decoder=True,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.ReformerModelWithLMHead(config).to(device, getattr(torch, dtype)).eval()
    text = torch.as_tensor(prompts(shape, batch), dtype=torch.long, device=device)

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

    return rate(generate, 2, PEER_NEW, 1)


def forward(shape: Shape, model, params) -> Callable[[], Any]:
    """A forward pass over the whole context, padded, and the logits of one position."""

    @jax.jit
    def next_token(params, tokens, position):
        features = model.features(params, tokens, jax.random.PRNGKey(0))
        features = jax.lax.dynamic_slice_in_dim(features, position, 1, axis=1)
        return jnp.argmax(model.logits(params, features), axis=-1)

    text = np.pad(prompts(shape, 1), ((0, 0), (0, shape.n_new)))
    return lambda: np.asarray(next_token(params, text, shape.context - shape.n_new))


def long_model(sizes: dict[str, int], far: str) -> tuple[models.LanguageModel, Any]:
    """The model that reads long prompts, whose fourth layers are `far`, and its weights."""
    window = sizes["window"]
    near = local.local(chunk_len=window // 2, n_chunks_before=2, window=window)
    shared = (
        dict(next_value=True) if far == DENSE else dict(n_kv_heads=max(1, sizes["n_heads"] // 4))
    )
    op = FAR[far](N_CHOSEN)
    model = models.TransformerLM(
        vocab_size=VOCAB_SIZE,
        **{name: sizes[name] for name in ("d_model", "d_ff", "n_heads", "n_layers")},
        d_attention_key=sizes["d_model"] // sizes["n_heads"],
        d_attention_value=sizes["d_model"] // sizes["n_heads"],
        attention_type=(near, near, op, near),
        pos_type="rotary_local",
        **shared,
        design=models.designs.qwen3(),
        dtype="bfloat16",
        mode="eval",
    )
    return model, jax.jit(lambda key: model.init_params(key, (1, 64)))(jax.random.PRNGKey(0))


def long_prompt(sizes: dict[str, int], n: int, mesh: Mesh | None, far: str) -> list[float]:
    """Bytes of the caches on a device, seconds of the prompt, and of a step after it."""
    model, params = long_model(sizes, far)
    text, n_new = np.random.default_rng(0).integers(0, VOCAB_SIZE, n), sizes["n_new"]
    where = dict(mesh=mesh, divide_caches=mesh is not None)
    read = functools.partial(generation.read, model, params, max_length=n + n_new, **where)
    first = text
    if far == DENSE:
        read = functools.partial(read, prompt_piece=sizes["piece"])
        first = text[: sizes["piece"] + 1]
    jax.block_until_ready(read([first]))  # compiles what reads the rest
    start = time.perf_counter()
    state = jax.block_until_ready(read([text]))
    seconds = time.perf_counter() - start
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.model))
    generate = functools.partial(generation.generate, model, params, [[]], state=state, **where)
    return [held, seconds, rate(generate, 1, n_new, 1)[0]]


def main_of_long_prompt(args: argparse.Namespace) -> None:
    """The table of one long prompt."""
    sizes = command_line.of_size(LONG, args.tiny)
    columns = "prompt", "devices", "caches a device, MiB", "prompt, s", "tokens/s", "step, ms"
    table = Table("far layers", *columns, "tokens/s, new")

    def cells(known: list[float]) -> list[str]:
        held, seconds, step = known
        speed = f"{args.prompt_len / seconds:,.0f}"
        found = f"{held / 2**20:,.2f}", f"{seconds:.2f}", speed, f"{step * 1e3:.3f}"
        return [*found, f"{1 / step:,.0f}"]

    n_devices = str(1 if args.mesh is None else args.mesh.size)
    for far in args.far:
        known = attempt(long_prompt, sizes, args.prompt_len, args.mesh, far)
        table.result(far, f"{args.prompt_len:,}", n_devices, known=known, cells=cells)


def mesh_of(text: str) -> Mesh:
    """The mesh of --mesh."""
    try:
        return mesh_lib.make(mesh_lib.parsed(text))
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> None:
    flags = command_line.parser(__doc__, repeats=5)
    flags.add_argument(
        "--prompt_len", type=command_line.positive, help="tokens of one long prompt, read in pieces"
    )
    text = "with --prompt_len: the devices that divide the caches, such as context=4"
    flags.add_argument("--mesh", type=mesh_of, help=text)
    text = "with --prompt_len: the fourth layers"
    flags.add_argument("--far", nargs="+", choices=FAR, default=[DENSE], help=text)
    args = flags.parse_args(argv)
    if args.prompt_len is not None:
        read = "tiny", "rows", "prompt_len", "mesh", "far"
        command_line.check_read(flags, args, read, "with --prompt_len")
        main_of_long_prompt(args)
        return
    command_line.check_read(flags, args, ("tiny", "rows", "repeats"), "without --prompt_len")
    shape = command_line.of_size(SHAPES, args.tiny)
    columns = "step, ms", "tokens/s", "prompt, s", "forward of all, ms", "forward / step"
    table = Table("model", "batch", *columns)

    def row(name: str, batch: int, measure: Callable[..., list[float]], *arguments: Any) -> None:
        def cells(known: list[float]) -> list[str]:
            step, prompt, *rest = known
            ratio = [x for one in rest for x in (f"{one * 1e3:.1f}", f"{one / step:.0f}")]
            return [f"{step * 1e3:.3f}", f"{batch / step:,.0f}", f"{prompt:.2f}", *ratio]

        known = attempt(measure, shape, batch, *arguments)
        table.result(name, str(batch), known=known, cells=cells)

    for name, options in LSH.items():
        model, params = reformer(shape, **options)
        for batch in shape.batches:
            row(f"reformax, {name}", batch, ours, model, params, args.repeats)
        del model, params
    for name, how in PEERS.items() if shape.axial else ():
        for batch in shape.batches:
            row(f"Hugging Face, {name}", batch, theirs, *how)


if __name__ == "__main__":
    main()
