// out = x @ W.T + bias for many rows of x: a block multiplies OUTPUTS outputs by ROWS rows over a part of K (split-K).
// WIDE x HIGH warps share x, W and its scales in a ring of buffers with 32 inputs each. One barrier suffices, as the
// buffer being written was read one iteration ago.
#define THREADS (32 * WIDE * HIGH)
#define SCALES (ROWS * 64 + OUTPUTS / 16 * W_BYTES)   // bytes of x and W, after which the scales are

extern "C" __global__ void __launch_bounds__(THREADS) NAME(ARGUMENTS) {
  OMITTED
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS, steps = K / 32 / gridDim.z;
  const int first = blockIdx.y * (OUTPUTS / 16);   // of the tiles of 16 outputs
  const int tile = warp / HIGH * N_TILES, run = warp % HIGH * T_TILES;   // first tile and run of 8 rows of the warp
  if (row >= ROWS_OF_STEP) return;
  auto load = [&](int i, int buffer) {   // inputs 32 i to 32 i + 31 of the part
    const int k = blockIdx.z * steps + i, size = W_BYTES / 16;
    char* to = memory + buffer * BUFFER;
    UNROLL for (int n = 0; n < ROWS * 4; n += THREADS) {
      const int c = n + threadIdx.x;
      const char* from = x + ((size_t)(row + c / 4) * K + c % 4 * 8) * 2;
      copy_async(to + c * 16, from + k * 64, i < steps && c < ROWS * 4);
    }
    UNROLL for (int n = 0; n < OUTPUTS / 16 * size; n += THREADS) {
      const int c = n + threadIdx.x;
      const char* from = weight + (size_t)(first + c / size) * (K / 32) * W_BYTES + c % size * 16;
      copy_async(to + ROWS * 64 + c * 16, from + k * W_BYTES, i < steps && c < OUTPUTS / 16 * size);
    }
    // One warp copies scales, one offsets; a word has two outputs
    const int at = (first + lane / 2) * GROUPS * 8 + k * GROUPS / (K / 32) * 8 + lane % 2 * 4;
    const bool is_needed = i < steps && lane < OUTPUTS / 8;
    if (HAS_SCALE) copy_async(to + SCALES + lane * 16, scale + at, is_needed && warp == 0);
    if (HAS_OFFSET) copy_async(to + SCALES + OUTPUTS * 2 + lane * 16, offset + at, is_needed && warp == 1);
    commit_copies();
  };
  float sums[N_TILES][T_TILES][4] = {};
  UNROLL for (int i = 0; i < BUFFERS - 1; i++) load(i, i);
  for (int i = 0, ahead = BUFFERS - 1; i < steps; i += BUFFERS)
  UNROLL for (int buffer = 0; buffer < BUFFERS && i + buffer < steps; buffer++) {
    wait_for_copies<BUFFERS - 2>();
    __syncthreads();
    load(i + buffer + ahead, (buffer + ahead) % BUFFERS);
    const char* from = memory + buffer * BUFFER;
    u32 w[N_TILES][2][4];
    UNROLL for (int n = 0; n < N_TILES; n++) {
      const u32* own = (const u32*)(from + SCALES) + (tile + n) * 8 + lane / 4;
      const u32 scales = HAS_SCALE ? *own : 0, offsets = HAS_OFFSET ? own[OUTPUTS / 2] : 0;
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
  UNROLL for (int i = 0; i < N_TILES * T_TILES; i++) {
    const int n = i / T_TILES, t = i % T_TILES, to = (blockIdx.z * gridDim.x * ROWS) + row + (run + t) * 8;
    store(out, sums[n][t], bias, first + tile + n, to, to + 8);
  }
}
