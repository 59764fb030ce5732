// out = x @ W.T + bias for many rows of x: a block multiplies OUTPUTS outputs by ROWS rows over a part of K (split-K).
// WIDE x HIGH warps share x, W and its scales in a ring of buffers with 32 inputs each. One barrier suffices, as the
// buffer being written was read one iteration ago. Iterations after the last one multiply zeros. DEEP such groups of
// warps, each with a ring, divide the block's part of K, for fewer iterations, and add up their sums at the end.
#define THREADS (32 * WIDE * HIGH)
#define SCALES (ROWS * 64 + OUTPUTS / 16 * W_BYTES)   // bytes of x and W, after which the scales are

extern "C" __global__ void __launch_bounds__(THREADS * DEEP) NAME(ARGUMENTS) {
  OMITTED
  extern __shared__ __align__(128) char memory[];
  const int group = threadIdx.x / THREADS, own = threadIdx.x % THREADS, lane = own % 32, warp = own / 32;
  const int row = blockIdx.x * ROWS, steps = K / 32 / gridDim.z / DEEP, ring = group * (BUFFERS * BUFFER);
  const int first = blockIdx.y * (OUTPUTS / 16);   // of the tiles of 16 outputs
  const int tile = warp / HIGH * N_TILES, run = warp % HIGH * T_TILES;   // first tile and run of 8 rows of the warp
  if (row >= ROWS_OF_STEP) return;
  auto load = [&](int i, int n) {   // iteration i + n of the part; i is a multiple of BUFFERS
    const int k = (blockIdx.z * DEEP + group) * steps + i, size = W_BYTES / 16, bytes = i + n < steps ? 16 : 0;
    char* to = memory + ring + n % BUFFERS * BUFFER;
    UNROLL for (int j = 0; j < ROWS * 4; j += THREADS) {
      const int c = j + own;
      const char* from = x + ((size_t)(row + c / 4) * K + c % 4 * 8 + k * 32) * 2;
      copy_async(to + c * 16, from + n * 64, bytes, c < ROWS * 4);
    }
    UNROLL for (int j = 0; j < OUTPUTS / 16 * size; j += THREADS) {
      const int c = j + own;
      const char* from = weight + ((size_t)(first + c / size) * (K / 32) + k) * W_BYTES + c % size * 16;
      copy_async(to + ROWS * 64 + c * 16, from + n * W_BYTES, bytes, c < OUTPUTS / 16 * size);
    }
    // One warp copies scales, one offsets; a word has two outputs
    const int at = (first + lane / 2) * GROUPS * 8 + (k + n) * GROUPS / (K / 32) * 8 + lane % 2 * 4;
    char* const scales = to + SCALES + lane * 16;
    if (HAS_SCALE) copy_async(scales, scale + at, bytes, lane < OUTPUTS / 8 && warp == 0);
    if (HAS_OFFSET) copy_async(scales + OUTPUTS * 2, offset + at, bytes, lane < OUTPUTS / 8 && warp == 1);
    commit_copies();
  };
  float sums[N_TILES][T_TILES][4] = {};
  UNROLL for (int i = 0; i < BUFFERS - 1; i++) load(0, i);
  for (int i = 0; i < steps; i += BUFFERS) UNROLL for (int buffer = 0; buffer < BUFFERS; buffer++) {
    wait_for_copies<BUFFERS - 2>();
    __syncthreads();
    load(i, buffer + BUFFERS - 1);
    const char* from = memory + ring + buffer * BUFFER;
    u32 w[N_TILES][2][4];
    UNROLL for (int n = 0; n < N_TILES; n++) {
      const u32* stored = (const u32*)(from + SCALES) + (tile + n) * 8 + lane / 4;
      const u32 scales = HAS_SCALE ? *stored : 0, offsets = HAS_OFFSET ? stored[OUTPUTS / 2] : 0;
      load_weights(w[n], from + ROWS * 64 + (tile + n) * W_BYTES, scales, offsets);
    }
    UNROLL for (int t = 0; t < T_TILES; t++) {
      const uint4 inputs = ((const uint4*)from)[(run + t) * 32 + lane];
      UNROLL for (int n = 0; n < N_TILES; n++) {
        mma(sums[n][t], w[n][0], inputs.x, inputs.y);
        mma(sums[n][t], w[n][1], inputs.z, inputs.w);
      }
    }
  }
  float* const shared = (float*)memory + own;
  if (DEEP > 1) wait_for_copies<0>();
  for (int other = 1; other < DEEP; other++) {
    __syncthreads();
    UNROLL for (int i = 0; i < N_TILES * T_TILES * 4; i++)
      if (group == other) shared[i * THREADS] = (&sums[0][0][0])[i];
    __syncthreads();
    UNROLL for (int i = 0; i < N_TILES * T_TILES * 4; i++)
      if (group == 0) (&sums[0][0][0])[i] += shared[i * THREADS];
  }
  if (group > 0) return;
  UNROLL for (int i = 0; i < N_TILES * T_TILES; i++) {
    const int n = i / T_TILES, t = i % T_TILES, to = (blockIdx.z * gridDim.x * ROWS) + row + (run + t) * 8;
    store(out, sums[n][t], bias, first + tile + n, to, to + 8);
  }
}
