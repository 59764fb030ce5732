// out = x @ W.T + bias on Hopper, for many rows of x, with warpgroup products (PTX ISA, wgmma).
//
// A block per multiprocessor has eight warps that multiply, each 16 outputs by the rows of a tile, and one that copies.
// A stage holds 64 inputs, or 128 of e4m3: x, then W of 128 outputs. Its barrier "full" counts bytes, its barrier
// "empty" counts warps. W goes to the tensor cores from registers: a lane loads (and dequantizes) its weights of the
// next stage during the products of this one. They read x from shared memory.
//
// x is packed by pack.cu as (tiles, K / INPUTS, ROWS, 128 bytes). A row's chunk of 16 bytes, q = 4 a + 2 i + h, has its
// inputs 32 a + 8 c + 4 i + 2 h + p for c in 0..3 and p in 0..1, as a lane has them of W, and is stored at
// q ^ (row % 8): the 128-byte swizzle, with which the tensor cores read shared memory without bank conflicts. If x is
// e4m3, q = 2 a + h has inputs 32 a + 8 c + 4 h + p for p in 0..3, W is multiplied as stored, and sums are scaled.
#define INPUTS (64 << IS_E4M3)   // of a row of 128 bytes
#define X_BYTES (ROWS * 128)
#define STAGE (X_BYTES + INPUTS / 4 * W_BYTES)

DEVICE void copy(u32 to, const void* from, int bytes, u32 bar) {
  PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(to), "l"(from), "r"(bytes), "r"(bar));
}
// Loads the lane's weights of 32 inputs: 4 of output r, 4 of r + 8 (their bytes alternate), then the next 4 of both
DEVICE void load_e4m3(u32 (&w)[4], const char* from) {
  const uint4 q = ((const uint4*)from)[threadIdx.x % 32];
  UNROLL for (int j = 0; j < 4; j++)
    w[j] = __byte_perm(j < 2 ? q.x : q.z, j < 2 ? q.y : q.w, j % 2 ? 0x7531 : 0x6420);
}

extern "C" __global__ void __launch_bounds__(384, 1) NAME(ARGUMENTS) {
  char* const stages = memory + (-address(memory) & 1023);
  const u32 smem = address(stages), bars = smem + STAGES * STAGE;   // full, empty
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = ROWS_OF_STEP;
  // Rounds of a tile per block and, at first, an incomplete one in which several blocks share a tile along K (split-K)
  const int row_tiles = (rows + ROWS - 1) / ROWS, tiles = (N + 127) / 128 * row_tiles, rounds = tiles / gridDim.x;
  const int sharers = min(K / INPUTS, gridDim.x / max(1, tiles % gridDim.x));
  if (threadIdx.x < STAGES * 2) init(bars + threadIdx.x * 8, threadIdx.x % 2 ? 8 : 1);
  PTX("fence.mbarrier_init.release.cluster;" ::);
  __syncthreads();
  int tile, k0, k1, s = 0, phase = 0;
  auto begin = [&](int round) {
    const int parts = round == rounds ? sharers : 1, part = blockIdx.x % parts;
    tile = round * gridDim.x + blockIdx.x / parts;
    k0 = part * (K / INPUTS) / parts; k1 = (part + 1) * (K / INPUTS) / parts;
    return tile < tiles;
  };
  auto next_stage = [&] { if (++s == STAGES) { s = 0; phase ^= 1; } };

  if (warp >= 8) {   // a lane per 16 outputs of W, the last lane x
    PTX("setmaxnreg.dec.sync.aligned.u32 40;" ::);
    for (int round = rounds; round >= 0 && warp == 8; round--)
      for (int k = begin(round) ? k0 : k1; k < k1; k++, next_stage()) {
        const u32 full = bars + s * 16, to = smem + s * STAGE;
        const int n16 = min(tile / row_tiles * 8 + lane, N / 16 - 1);
        wait(full + 8, phase ^ 1);
        if (lane == 0) arrive(full, STAGE);
        __syncwarp();
        if (lane == 31) copy(to, x + (size_t)(tile % row_tiles * (K / INPUTS) + k) * X_BYTES, X_BYTES, full);
        const int bytes = INPUTS / 32 * W_BYTES;
        const char* w = weight + ((size_t)n16 * (K / INPUTS) + k) * bytes;
        if (lane < 8) copy(to + X_BYTES + lane * bytes, w, bytes, full);
      }
    return;
  }
  PTX("setmaxnreg.inc.sync.aligned.u32 232;" ::);
  float sums[ROWS / 2];
  for (int round = rounds; round >= 0; round--) {
    if (!begin(round)) continue;
    const int row_tile = tile % row_tiles, n16 = min(tile / row_tiles * 8 + warp, N / 16);   // N / 16: no outputs
    auto load = [&](u32 (&w)[4][4], int k) {   // the lane's weights of stage s
      const char* from = stages + s * STAGE + X_BYTES + warp * (INPUTS / 32) * W_BYTES;
      UNROLL for (int i = 0; i < 4 && IS_E4M3; i++) load_e4m3(w[i], from + i * W_BYTES);
      UNROLL for (int i = 0; i < 2 && !IS_E4M3; i++) {
        const int group = (k * 2 + i) * GROUPS / (K / 32) + lane % 4 * SETS / 4;
        const int at = (min(n16, N / 16 - 1) * GROUPS + group) * 8 + lane / 4;
        const u32 scales = HAS_SCALE ? __ldg(scale + at) : 0, offsets = HAS_OFFSET ? __ldg(offset + at) : 0;
        load_weights(w + i * 2, from + i * W_BYTES, scales, offsets);
      }
    };
    auto step = [&](u32 (&w)[4][4], u32 (&next)[4][4], int k) {
      const unsigned long long descriptor = 1ull << 62 | 64ull << 32 | 1ull << 16 | (smem + s * STAGE) >> 4;   // of x
      const u32 empty = bars + s * 16 + 8;
      PTX("wgmma.fence.sync.aligned;" ::);
      UNROLL for (int i = 0; i < 4; i++) wgmma(sums, w[i], descriptor + i * 2, i || k > k0);
      PTX("wgmma.commit_group.sync.aligned;" ::);
      next_stage();
      if (k + 1 < k1) { wait(bars + s * 16, phase); load(next, k + 1); }
      PTX("wgmma.wait_group.sync.aligned 0;" ::);
      if (lane == 0) arrive(empty, 0);
    };
    u32 w[2][4][4];
    wait(bars + s * 16, phase);
    load(w[0], k0);
    for (int k = k0; k < k1; k += 2) {
      step(w[0], w[1], k);
      if (k + 1 < k1) step(w[1], w[0], k + 1);
    }

    float* own = partial + blockIdx.x * (ROWS * 128) + threadIdx.x;
    if (k1 < K / INPUTS) {   // give the sums to the block that has the end of K
      UNROLL for (int i = 0; i < ROWS / 2; i++) __stcg(own + i * 256, sums[i]);
      __threadfence();
      __syncwarp();
      if (lane == 0) count(flags + blockIdx.x * 8 + warp);
      continue;
    }
    for (int peer = blockIdx.x - 1; peer >= (int)blockIdx.x - sharers + 1 && k0 > 0; peer--) {
      u32* const flag = flags + peer * 8 + warp;
      while (!read_flag(flag)) {}
      __syncwarp();
      own -= ROWS * 128;
      UNROLL for (int i = 0; i < ROWS / 2; i++) sums[i] += __ldcg(own + i * 256);
      __syncwarp();
      if (lane == 0) *flag = 0;   // for the next launch
    }
    UNROLL for (int i = 0; i < ROWS / 2 && IS_E4M3 && n16 < N / 16; i++) {
      const int row = row_tile * ROWS + i / 4 * 8 + lane % 4 * 2 + i % 2;
      sums[i] *= ((const float*)(x + (size_t)T * K))[row] * float_of(scale[n16 * 8 + lane / 4] >> i / 2 % 2 * 16);
    }
    UNROLL for (int j = 0; j < ROWS / 8; j++)
      if (n16 < N / 16) store(out, sums + j * 4, bias, n16, [&](int r) { return row_tile * ROWS + j * 8 + r; }, rows);
  }
}
