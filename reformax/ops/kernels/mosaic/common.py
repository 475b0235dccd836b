"""Functions of kernels in Pallas for Mosaic GPU, for JAX's versions and for its interpreter.

A *warpgroup* is 128 threads that compute tiles of 64 rows. Its products (wgmma) read the right side
from shared memory, where rows lie in a pattern without conflicts, and the left side from there or
from registers. JAX's interpreter knows neither registers nor code below Pallas: there, arrays take
their place.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

# Rows of a tile: those of a warpgroup's product.
ROWS = 64
THREADS = 128
# Bytes of a row of a tile in shared memory. Wider rows are several tiles side by side.
SWIZZLE = 128
# Bytes of a thread's copy into shared memory.
PIECE = 16


def launch(
    kernel: Callable[..., None],
    inputs: Sequence[Array],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    grid: dict[str, int],
    interpret: bool,
    name: str,
) -> list[Array]:
    """Runs a kernel, a warpgroup for each index of the grid.

    Args:
      kernel: called with references to the inputs, the outputs and the scratch.
      scratch: types of memory that the warpgroup has, such as `tiles` and barriers.
      grid: sizes by the names of axes, the fastest first.
      name: the name in profiles.
    """
    # JAX 0.10 has "lane" as its default, 0.12 "warpgroup", which infers the layouts of registers.
    semantics = type(plgpu.CompilerParams().lowering_semantics).Lane
    run = plgpu.kernel(
        kernel,
        out_type=list(out_shape),
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics),
        interpret=_interpreter() if interpret else None,
    )
    return run(*inputs)


def _interpreter() -> Any:
    from jax._src.pallas.mosaic_gpu.interpret import params

    name = "InterpretGPUParams" if hasattr(params, "InterpretGPUParams") else "InterpretParams"
    return getattr(params, name)()


def tiles(n: int, size: int, dtype: Any) -> Any:
    """Shared memory for `n` tiles of rows of `size`, as products read them."""
    return plgpu.SMEM((n, ROWS, size), dtype, transforms=_transforms(dtype))


def _transforms(dtype: Any) -> tuple[Any, Any]:
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """The operations of a warpgroup, compiled or interpreted."""

    interpret: bool  # whether the kernel is interpreted

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """A tile, or a number for each of its rows."""
        layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return self._laid_out(jnp.full(shape, value, jnp.float32), layout)

    def indices(self, shape: tuple[int, int], axis: int) -> Int[Array, "I J"]:
        """The index along an axis of a tile."""
        return self._laid_out(lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)

    def _laid_out(self, x: Array, layout: Any) -> Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def along(self, ref: Any, index: tuple, shape: tuple[int, int], axis: int) -> Array:
        """Numbers of an array in memory, `ref[index]`, along an axis of a tile."""
        if self.interpret:
            return lax.broadcast_in_dim(ref[index], shape, [axis])
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        # JAX 0.12 takes one argument for both.
        two = "idx" in inspect.signature(plgpu.load).parameters
        of = (ref, index) if two else (ref.at[index],)
        return lax.broadcast_in_dim(plgpu.load(*of, layout=layout, optimized=False), shape, [axis])

    def product(self, a: Any, b: Any, transpose_b: bool = False) -> Float[Array, "I K"]:
        """The product of a tile, in shared memory or in registers, and one in shared memory."""
        if self.interpret:
            dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
            a = a if isinstance(a, jax.Array) else a[...]
            return lax.dot_general(a, b[...], dims, preferred_element_type=jnp.float32)
        width = b.shape[0] if transpose_b else b.shape[1]

        def multiply(acc):
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, width), jnp.float32))

    def gather(self, to: Sequence[Any], rows: Sequence[Any], positions: Any) -> None:
        """Begins to copy rows by position into tiles; positions that do not exist are zeros.

        Args:
          to: tiles, references to `[ROWS, H]` in shared memory.
          rows: for each tile the rows, a reference to `[T, H]` in memory.
          positions: a reference to `[ROWS]` integers in memory.
        """
        for dst, src in zip(to, rows, strict=True):
            if self.interpret:
                _gather_rows(dst, src, positions)
            else:
                dst_type = plgpu.RefType(_transforms(dst.dtype))
                types = dst_type, plgpu.RefType(), plgpu.RefType()
                plgpu.inline_mgpu(arg_types=types)(_copy_rows)(dst, src, positions)

    def commit(self) -> None:
        """Ends a group of `gather`s."""
        if not self.interpret:
            plgpu.inline_mgpu()(lambda ctx: _assembly("cp.async.commit_group;"))()

    def wait(self, n_groups: int) -> None:
        """Waits until at most `n_groups` groups are on their way. Products see the others."""
        if not self.interpret:
            text = f"cp.async.wait_group {n_groups};"
            plgpu.inline_mgpu()(lambda ctx: _assembly(text))()
            plgpu.commit_smem()


def _gather_rows(dst: Any, src: Any, positions: Any) -> None:
    """`gather` of a tile by the interpreter."""
    position = positions[...]
    dst[...] = src[...].at[position].get(mode="fill", fill_value=0)


def _copy_rows(ctx: Any, dst: Any, src: Any, positions: Any) -> None:
    """`gather` of a tile on a GPU: each thread copies some pieces of 16 bytes (cp.async).

    The chip's unit for bulk copies (TMA) takes rows by index from the next generation on. Pallas
    has no other copy of rows by index, so this is code of the layer below it.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref

    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))

    def number(value: int, of: Any = i32) -> Any:
        return arith.constant(of, value)

    # Threads of a warpgroup copy the pieces of neighbouring rows, and none of another's rows.
    utils.warpgroup_barrier()
    source = ir.MemRefType(src.type)
    n_rows, size = source.shape
    itemsize = utils.bytewidth(source.element_type)
    stride = source.get_strides_and_offset()[0][0] * itemsize
    per_row = size * itemsize // PIECE
    to = llvm.ptrtoint(i32, utils.memref_ptr(dst))
    start = llvm.ptrtoint(i64, utils.memref_ptr(src))
    thread = arith.remui(utils.thread_idx(), number(THREADS))
    for i in range(ROWS * per_row // THREADS):
        piece = arith.addi(thread, number(i * THREADS))
        row, column = (op(piece, number(per_row)) for op in (arith.divui, arith.remui))
        position = memref.load(positions, [arith.index_cast(ir.IndexType.get(), row)])
        exists = arith.cmpi(arith.CmpIPredicate.ult, position, number(n_rows))
        read = arith.select(exists, number(PIECE), number(0))
        position = arith.select(exists, position, number(0))
        offset = arith.muli(arith.extui(i64, position), number(stride, i64))
        offset = arith.addi(offset, arith.extui(i64, arith.muli(column, number(PIECE))))
        # Tiles of 8 rows of 128 bytes; those of one group of rows are neighbours. A row's pieces
        # are exchanged by its number.
        tile, column = (op(column, number(8)) for op in (arith.divui, arith.remui))
        group, row = (op(row, number(8)) for op in (arith.divui, arith.remui))
        n_tiles = per_row // 8
        tile = arith.addi(arith.muli(group, number(n_tiles)), tile)
        line = arith.addi(arith.muli(tile, number(8)), row)
        place = arith.addi(
            arith.muli(line, number(SWIZZLE)), arith.muli(arith.xori(column, row), number(PIECE))
        )
        _assembly(
            "cp.async.cg.shared.global [$0], [$1], 16, $2;",
            "r,l,r",
            arith.addi(to, place),
            arith.addi(start, offset),
            read,
        )


def _assembly(text: str, constraints: str = "", *operands: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)
