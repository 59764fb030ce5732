// out = x @ W.T + bias, also of groups of rows with an expert each: a block multiplies OUTPUTS outputs by ROWS rows
// over a part of K (split-K). WIDE x HIGH warps share x, W and its scales in a ring of buffers with 32 inputs each. One
// barrier suffices, as the buffer being written was read one iteration ago. Missing rows, and iterations after the last
// one, are zeros. DEEP such groups of warps, each with a ring, divide the block's part of K, and add up their sums.
// With few rows, and a scale for 32 inputs, scaling their sums takes fewer instructions than scaling the weights.
//
// LoRA adds b @ a @ x of each row's adapter. `adapters` has that of each row, then the number of the step's adapters,
// and their list. The first A_BLOCKS blocks read the rows of their a, one adapter's after the other's, instead of W.
// They store the sums in ax, and their warps count in a flag. Blocks start in this order, so that others can wait for
// them. The last warp that has waited resets the flag and its second counter.
#define THREADS (32 * WIDE * HIGH)
#define SCALES (ROWS * 64 + OUTPUTS / 16 * W_BYTES)   // bytes of x and W, after which the scales are
#define SCALES_SUMS (HAS_SCALE && T_TILES == 1 && SETS == 1)
#define ONES (TYPE[0] == 'b' ? 0x3f803f80 : 0x3c003c00)
#define A_BLOCKS ((ADAPTERS * RANK + OUTPUTS - 1) / OUTPUTS)
#define CHUNKS (RANK / 32)

extern "C" __global__ void __launch_bounds__(THREADS * DEEP) NAME(ARGUMENTS) {
  const int part = threadIdx.x / THREADS, own = threadIdx.x % THREADS, lane = own % 32, warp = own / 32;
  const int* group = row_groups + blockIdx.x / ROW_TILES * ROW_GROUP;
  const int expert = HAS_ROW_GROUPS ? group[0] % EXPERTS : 0, row = blockIdx.x % ROW_TILES * ROWS;
  auto target = [&](int r) {   // row of `out`, without split-K
    if (NUM_ROWS % ROWS && r >= NUM_ROWS) return ROWS_OUT;
    return ROW_GROUP > 1 ? group[1 + r] : ROW_GROUP ? (int)blockIdx.x / ROW_TILES : r;
  };
  const int block = (int)blockIdx.y - A_BLOCKS, chunks = HAS_A ? adapters[T] * CHUNKS : 0, ring = part * RING;
  const bool is_a = HAS_A && block < 0;
  const int first = is_a ? blockIdx.y * (OUTPUTS / 16) : expert * (N / 16) + block * (OUTPUTS / 16);   // tile of 16
  if (row >= ROWS_OF_STEP || target(row) >= ROWS_OUT || is_a && first >= chunks * 2) return;
  const int tile = warp / HIGH * N_TILES, run = warp % HIGH * T_TILES;   // first tile and run of 8 rows of the warp
  const int share = blockIdx.z * DEEP + part, shares = SPLITS * DEEP, steps = (K / 32 + shares - 1) / shares;
  const int begin = share * (K / 32) / shares, end = (share + 1) * (K / 32) / shares;
  int source[(ROWS * 4 + THREADS - 1) / THREADS];   // rows of x that the thread copies
  UNROLL for (int j = 0; j < ROWS * 4; j += THREADS) {
    const int t = target(row + min(j + own, ROWS * 4 - 1) / 4);
    source[j / THREADS] = t < ROWS_OUT ? t / (ROWS_OUT / T) : -1;
  }
  int a_tiles[(OUTPUTS * 4 + THREADS - 1) / THREADS];
  UNROLL for (int j = 0; j < OUTPUTS * 4 && is_a; j += THREADS) {
    const int n16 = min(first + (j + own) / 64, chunks * 2 - 1);
    a_tiles[j / THREADS] = adapters[T + 1 + n16 / (RANK / 16)] * (RANK / 16) + n16 % (RANK / 16);
  }
  auto load = [&](int i, int n) {   // iteration i + n of the part; i is a multiple of BUFFERS
    const int k = begin + i, size = W_BYTES / 16, bytes = k + n < end ? 16 : 0;
    char* to = memory + ring + n % BUFFERS * BUFFER;
    UNROLL for (int j = 0; j < ROWS * 4; j += THREADS) {
      const int c = j + own, t = source[j / THREADS];
      const char* from = x + ((size_t)max(t, 0) * K + c % 4 * 8 + k * 32) * 2;
      copy_async(to + c * 16, from + n * 64, t < 0 ? 0 : bytes, c < ROWS * 4);
    }
    UNROLL for (int j = 0; j < OUTPUTS / 16 * size; j += THREADS) {
      const int c = j + own, n16 = is_a ? a_tiles[j / THREADS] : first + c / size;
      const char* from = (is_a ? a : weight) + ((size_t)n16 * (K / 32) + k) * W_BYTES + c % size * 16;
      copy_async(to + ROWS * 64 + c * 16, from + n * W_BYTES, bytes, c < OUTPUTS / 16 * size);
    }
    // The first warp copies scales, the last one offsets; a word has two outputs
    UNROLL for (int c = lane; c < OUTPUTS / 8 * SETS; c += 32) {
      const int at = ((first + c / 2 / SETS) * GROUPS + (k + n) * GROUPS / (K / 32)) * 8 + c % (2 * SETS) * 4;
      if (HAS_SCALE) copy_async(to + SCALES + c * 16, scale + at, bytes, warp == 0);
      char* const offsets = to + SCALES + OUTPUTS * 2 * SETS + c * 16;
      if (HAS_OFFSET) copy_async(offsets, offset + at, bytes, warp == WIDE * HIGH - 1);
    }
    commit_copies();
  };
  float sums[N_TILES][T_TILES][4] = {};
  UNROLL for (int i = 0; i < BUFFERS - 1; i++) load(0, i);
  int of_row[T_TILES];   // adapters
  UNROLL for (int t = 0; t < T_TILES && HAS_A; t++) of_row[t] = adapters[min(row + (run + t) * 8 + lane / 4, T - 1)];
  for (int i = 0; i < steps; i += BUFFERS) UNROLL for (int buffer = 0; buffer < BUFFERS; buffer++) {
    wait_for_copies<BUFFERS - 2>();
    if (THREADS > 32) __syncthreads(); else __syncwarp();
    load(i, buffer + BUFFERS - 1);
    const char* from = memory + ring + buffer * BUFFER;
    u32 w[N_TILES][2][4], scales[N_TILES] = {}, offsets[N_TILES] = {};
    UNROLL for (int n = 0; n < N_TILES; n++) {
      const u32* stored = (const u32*)(from + SCALES) + ((tile + n) * SETS + lane % 4 * SETS / 4) * 8 + lane / 4;
      if (HAS_SCALE) scales[n] = *stored;
      if (HAS_OFFSET) offsets[n] = stored[OUTPUTS / 2 * SETS];
      load_weights<SCALES_SUMS>(w[n], from + ROWS * 64 + (tile + n) * W_BYTES, scales[n], offsets[n]);
    }
    UNROLL for (int t = 0; t < T_TILES; t++) {
      const uint4 inputs = ((const uint4*)from)[(run + t) * 32 + lane];
      const u32 ones[4] = {ONES, ONES, ONES, ONES};
      float of_x[4] = {};
      if (SCALES_SUMS) { mma(of_x, ones, inputs.x, inputs.y); mma(of_x, ones, inputs.z, inputs.w); }
      UNROLL for (int n = 0; n < N_TILES; n++) {
        float raw[4] = {}, *to = SCALES_SUMS ? raw : sums[n][t];
        mma(to, w[n][0], inputs.x, inputs.y);
        mma(to, w[n][1], inputs.z, inputs.w);
        UNROLL for (int e = 0; e < 4 && SCALES_SUMS; e++) {
          const float s = float_of(scales[n] >> e / 2 * 16), o = float_of(offsets[n] >> e / 2 * 16);
          sums[n][t][e] += raw[e] * (s * (IS_FLOAT ? 1 : 1 << 24)) + of_x[e] * (o - s * ZERO_POINT);
        }
      }
    }
  }
  u32* const flag = flags + (blockIdx.z * gridDim.x + blockIdx.x) * 2;
  while (HAS_A && !is_a && read_flag(flag) < (chunks * 32 + OUTPUTS - 1) / OUTPUTS * WIDE * HIGH) {}
  _Pragma("unroll 4") for (int j = part; j < chunks && !is_a; j += DEEP) {   // 32 numbers of ax
    const int adapter = adapters[T + 1 + j / CHUNKS];
    const char* from = b + ((size_t)(adapter * (N / 16) + first + tile) * CHUNKS + j % CHUNKS) * 1024;
    u32 w[N_TILES][2][4];
    UNROLL for (int n = 0; n < N_TILES; n++) load_weights(w[n], from + n * CHUNKS * 1024, 0, 0);
    UNROLL for (int t = 0; t < T_TILES; t++) {
      const size_t r = blockIdx.z * T + min(row + (run + t) * 8 + lane / 4, T - 1), at = r * ADAPTERS * CHUNKS + j;
      const uint4 inputs = of_row[t] == adapter ? __ldcg((const uint4*)ax + at * 4 + lane % 4) : uint4();
      UNROLL for (int n = 0; n < N_TILES; n++) {
        mma(sums[n][t], w[n][0], inputs.x, inputs.y);
        mma(sums[n][t], w[n][1], inputs.z, inputs.w);
      }
    }
  }
  const u32 last = (gridDim.y - A_BLOCKS) * WIDE * HIGH * DEEP - 1;
  if (HAS_A && !is_a && lane == 0 && atomicInc(flag + 1, last) == last) *flag = 0;
  if (DEEP > 1) {
    wait_for_copies<0>();
    __syncthreads();
    UNROLL for (int i = 0; i < N_TILES * T_TILES * 4; i++)
      ((float*)(memory + ring))[i * THREADS + own] = (&sums[0][0][0])[i];
    __syncthreads();
    if (part > 0) return;
    for (int other = 1; other < DEEP; other++)
      UNROLL for (int i = 0; i < N_TILES * T_TILES * 4; i++)
        (&sums[0][0][0])[i] += ((float*)(memory + other * RING))[i * THREADS + own];
  }
  UNROLL for (int i = 0; i < N_TILES * T_TILES; i++) {
    const int n = i / T_TILES, t = i % T_TILES, n16 = first + tile + n, end = (blockIdx.z + 1) * ROWS_OUT;
    auto to = [&](int r) { return (int)blockIdx.z * ROWS_OUT + target(row + (run + t) * 8 + r); };
    if (!is_a) store(out, sums[n][t], bias + expert * N, n16 - expert * (N / 16), to, end);
    else if (n16 < chunks * 2) store<true>(ax, sums[n][t], bias, n16, to, end);
  }
  __syncwarp();
  if (is_a && lane == 0) count(flag);
}
