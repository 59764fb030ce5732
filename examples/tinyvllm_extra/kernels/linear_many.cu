// out = x @ W.T + bias for many rows of x: a block multiplies OUTPUTS outputs by ROWS rows over a part of K (split-K).
// WIDE x HIGH warps share x, W and its scales in a ring of buffers with 32 inputs each. One barrier suffices, as the
// buffer being written was read one iteration ago. Iterations after the last one multiply zeros.
#define THREADS (32 * WIDE * HIGH)
#define MIN_BLOCKS (N_TILES * T_TILES > 8 ? 1 : 512 / THREADS)   // on a multiprocessor: at most 128 registers per lane
#define SCALES (ROWS * 64 + OUTPUTS / 16 * W_BYTES)   // bytes of x and W, after which the scales are

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) NAME(ARGUMENTS) {
  OMITTED
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS, steps = K / 32 / gridDim.z;
  const int first = blockIdx.y * (OUTPUTS / 16);   // of the tiles of 16 outputs
  const int tile = warp / HIGH * N_TILES, run = warp % HIGH * T_TILES;   // first tile and run of 8 rows of the warp
  if (row >= ROWS_OF_STEP) return;
  auto load = [&](int i, int n) {   // iteration i + n of the part; i is a multiple of BUFFERS
    const int k = blockIdx.z * steps + i, size = W_BYTES / 16;
    char* to = memory + n % BUFFERS * BUFFER;
    UNROLL for (int j = 0; j < ROWS * 4; j += THREADS) {
      const int c = j + threadIdx.x;
      const char* from = x + ((size_t)(row + c / 4) * K + c % 4 * 8 + k * 32) * 2;
      copy_async(to + c * 16, from + n * 64, i + n < steps, c < ROWS * 4);
    }
    UNROLL for (int j = 0; j < OUTPUTS / 16 * size; j += THREADS) {
      const int c = j + threadIdx.x;
      const char* from = weight + ((size_t)(first + c / size) * (K / 32) + k) * W_BYTES + c % size * 16;
      copy_async(to + ROWS * 64 + c * 16, from + n * W_BYTES, i + n < steps, c < OUTPUTS / 16 * size);
    }
    // One warp copies scales, one offsets; a word has two outputs
    const int at = (first + lane / 2) * GROUPS * 8 + (k + n) * GROUPS / (K / 32) * 8 + lane % 2 * 4;
    char* const own = to + SCALES + lane * 16;
    if (HAS_SCALE) copy_async(own, scale + at, i + n < steps, lane < OUTPUTS / 8 && warp == 0);
    if (HAS_OFFSET) copy_async(own + OUTPUTS * 2, offset + at, i + n < steps, lane < OUTPUTS / 8 && warp == 1);
    commit_copies();
  };
  float sums[N_TILES][T_TILES][4] = {};
  UNROLL for (int i = 0; i < BUFFERS - 1; i++) load(0, i);
  for (int i = 0; i < steps; i += BUFFERS) UNROLL for (int buffer = 0; buffer < BUFFERS; buffer++) {
    wait_for_copies<BUFFERS - 2>();
    __syncthreads();
    load(i, buffer + BUFFERS - 1);
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
