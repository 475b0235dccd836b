"""Chunked attention forward in CuTe DSL: rows by index by cp.async, mma.sync, online softmax."""
import os, sys, math, time
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
import cutlass, cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor

ROWS, KEYS, H, L, THREADS = 64, 64, int(sys.argv[1]) if len(sys.argv) > 1 else 64, 64, 128

@cute.kernel
def kernel(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, order: cute.Tensor, o: cute.Tensor,
           lse: cute.Tensor, layout: cute.ComposedLayout, tiled_mma: cute.TiledMma):
    tid, _, _ = cute.arch.thread_idx()
    tile, n, b = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    sq = smem.allocate_tensor(cutlass.BFloat16, layout, 1024)
    sk = smem.allocate_tensor(cutlass.BFloat16, layout, 1024)
    sv = smem.allocate_tensor(cutlass.BFloat16, layout, 1024)
    sp = smem.allocate_tensor(cutlass.Int32, cute.make_layout((KEYS,)), 16)
    T = q.shape[1]
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    per_row = H // 8

    # Rows by index: each thread copies pieces of 16 bytes.
    for i in cutlass.range_constexpr(ROWS * per_row // THREADS):
        piece = tid + i * THREADS
        row, col = piece // per_row, piece % per_row
        p = order[b, n, tile * ROWS + row]
        g = cute.local_tile(q[b, p, n, None], (8,), (col,))
        s = cute.local_tile(sq[row, None], (8,), (col,))
        cute.copy(atom, g, s)
    cute.arch.cp_async_commit_group()

    thr = tiled_mma.get_slice(tid)
    lane = tid % 32
    my_row, my_col = tid // 32 * 16 + lane // 4, lane % 4 * 2
    rq = tiled_mma.make_fragment_A(thr.partition_A(sq))
    rk = tiled_mma.make_fragment_B(thr.partition_B(sk))
    sVt = cute.composition(sv, cute.make_layout((H, KEYS), stride=(KEYS, 1)))
    rv = tiled_mma.make_fragment_B(thr.partition_B(sVt))
    acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, H)), cutlass.Float32)
    acc.fill(0.0)
    s = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, KEYS)), cutlass.Float32)
    ld = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.BFloat16)
    ldt = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), cutlass.BFloat16)
    cq = cute.make_tiled_copy_A(ld, tiled_mma).get_slice(tid)
    ck = cute.make_tiled_copy_B(ld, tiled_mma).get_slice(tid)
    cv = cute.make_tiled_copy_B(ldt, tiled_mma).get_slice(tid)
    row_max = cute.make_rmem_tensor((2,), cutlass.Float32); row_max.fill(-1e30)
    row_sum = cute.make_rmem_tensor((2,), cutlass.Float32); row_sum.fill(0.0)
    scale = cutlass.Float32(math.log2(math.e) / math.sqrt(H))

    first = cutlass.max(tile - 1, 0)
    for block in cutlass.range(first, tile + 1, unroll=1):
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(KEYS * per_row // THREADS):
            piece = tid + i * THREADS
            row, col = piece // per_row, piece % per_row
            p = order[b, n, block * KEYS + row]
            if col == 0:
                sp[row] = p
            cute.copy(atom, cute.local_tile(k[b, p, n, None], (8,), (col,)), cute.local_tile(sk[row, None], (8,), (col,)))
            cute.copy(atom, cute.local_tile(v[b, p, n, None], (8,), (col,)), cute.local_tile(sv[row, None], (8,), (col,)))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.copy(cute.make_tiled_copy_A(ld, tiled_mma), cq.partition_S(sq), cq.retile(rq))
        cute.copy(cute.make_tiled_copy_B(ld, tiled_mma), ck.partition_S(sk), ck.retile(rk))
        cute.copy(cute.make_tiled_copy_B(ldt, tiled_mma), cv.partition_S(sVt), cv.retile(rv))
        s.fill(0.0)
        cute.gemm(tiled_mma, s, rq, rk, s)
        # Accumulators: (2 columns, 2 rows) of m16n8.
        view = cute.make_tensor(s.iterator, cute.make_layout((2, (2, KEYS // 8)), stride=(2, (1, 4))))
        accv = cute.make_tensor(acc.iterator, cute.make_layout((2, (2, H // 8)), stride=(2, (1, 4))))
        for r in cutlass.range_constexpr(2):
            qp = order[b, n, tile * ROWS + my_row + 8 * r]
            line = view[r, None]
            for c in cutlass.range_constexpr(cute.size(line)):
                kp = sp[c // 2 * 8 + my_col + c % 2]
                if kp >= qp:
                    line[c] = -cutlass.Float32.inf
            x = line.load() * scale
            m = x.reduce(cute.ReductionOp.MAX, row_max[r], 0)
            m = cutlass.max(m, cute.arch.shuffle_sync_bfly(m, offset=1))
            m = cutlass.max(m, cute.arch.shuffle_sync_bfly(m, offset=2))
            weights = cute.math.exp2(x - m, fastmath=True)
            decay = cute.math.exp2(row_max[r] - m, fastmath=True)
            row_sum[r] = row_sum[r] * decay + weights.reduce(cute.ReductionOp.ADD, cutlass.Float32(0), 0)
            row_max[r] = m
            line.store(weights)
            accv[r, None].store(accv[r, None].load() * decay)
        pw = cute.make_rmem_tensor(s.layout, cutlass.BFloat16)
        pw.store(s.load().to(cutlass.BFloat16))
        a_layout = cute.make_layout(((2, 2, 2), 1, KEYS // 16), stride=((1, 2, 4), 0, 8))
        cute.gemm(tiled_mma, acc, cute.make_tensor(pw.iterator, a_layout), rv, acc)

    accv = cute.make_tensor(acc.iterator, cute.make_layout((2, (2, H // 8)), stride=(2, (1, 4))))
    for r in cutlass.range_constexpr(2):
        t = row_sum[r]
        t += cute.arch.shuffle_sync_bfly(t, offset=1)
        t += cute.arch.shuffle_sync_bfly(t, offset=2)
        slot = tile * ROWS + my_row + 8 * r
        inverse = 1.0 / t
        if t == 0.0:
            inverse = cutlass.Float32(0.0)
        for c in cutlass.range_constexpr(H // 4):
            o[b, n, slot, c // 2 * 8 + my_col + c % 2] = (accv[r, c] * inverse).to(cutlass.BFloat16)
        lse[b, n, slot] = row_max[r] + cute.math.log2(t)

@cute.jit
def run(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, order: cute.Tensor, o: cute.Tensor, lse: cute.Tensor):
    atom = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, 64), stride=(64, 1)))
    layout = cute.tile_to_shape(atom, (ROWS, H), (0, 1))
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)),
                              cute.make_layout((4, 1, 1)), permutation_mnk=(64, 16, 16))
    kernel(q, k, v, order, o, lse, layout, mma).launch(
        grid=[cute.size(order.shape[2]) // ROWS, q.shape[2], q.shape[0]], block=[THREADS, 1, 1])

B, T, N = 1, 65536, 8
F = lambda dt, shape: make_fake_compact_tensor(dt, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)
row = (B, T, N, H)
t = time.time()
c = cute.compile(run, F(cutlass.BFloat16, row), F(cutlass.BFloat16, row), F(cutlass.BFloat16, row),
                 F(cutlass.Int32, (B, N, T)), F(cutlass.BFloat16, (B, N, T, H)), F(cutlass.Float32, (B, N, T)))
print("compiled", time.time() - t)
