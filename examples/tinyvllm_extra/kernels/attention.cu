// Paged attention on tensor cores (FlashAttention-2, Dao 2023, arXiv:2307.08691): a warp multiplies 16 M query rows by
// 16 positions, a block of the context, and the scores stay in registers to weight V. tensor_cores.py has its layout.
//
// Decode: a work group has a token and a K/V head, and the rows are its G query heads. Its warps, and with split-KV the
// work groups of all splits, share the context. Prefill: a work group has a query head and a query tile, with 16 M
// tokens per warp, and copies STAGE blocks at a time to shared memory. For a tile of up to 16 M tokens, the warps share
// the context.
#define LOG2_E 1.44269504f
#define BLOCK (16 * D * (IS_BYTES ? 1 : 2))   // bytes of K or V of 16 positions
#define THREADS (32 * WARPS)
#define ROWS (IS_PREFILL ? 16 * M : G)        // of a warp
#define FACTOR (IS_BYTES && !HAS_SCALES ? 256 : 1)   // see halves
#define SCALE_FACTOR (HAS_SCALES ? 64.f : 1.f)   // keeps products of weights and V's scales in float16's normal range
#define HALVES (ROWS > 8 ? 2 : 1)             // rows of a lane in 16: lane / 4, and 8 below

// Two bytes as float16: int8 with an offset of 128, or fp8, 2**8 times too small
DEVICE u32 halves(u32 x) {
  if (HAS_SCALES) return scaled((x & 0xff00ff) | 0x64006400, 0x64806480, 0x3c003c00, 0);   // 1024 + x - 1152
  return (x & 0x7f007f) << 7 | (x & 0x800080) << 8;
}

// With a minimum of one work group for a multiprocessor, ptxas loads more ahead, but 16 warps would spill
extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 8 ? 0 : 1) NAME(ARGUMENTS) {
  OMITTED
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4;
  // A query tile is TILE * first token + number of further tokens
  const int tile = IS_PREFILL ? tokens[NUM_WORDS * T + gridDim.y - 1 - blockIdx.y] : blockIdx.y;
  if (tile < 0) return;
  const int first = tile / TILE, size = tile % TILE + 1, head = blockIdx.x / (IS_PREFILL ? G : 1);
  const bool is_shared = size <= 16 * M;   // the warps share the context
  const int begin = is_shared ? 0 : warp * 16 * M;
  const int* const slots = tokens + SLOT * T + first;
  const bool is_alone = (!first || slots[-1] != *slots) && (first == T - 1 || slots[1] != *slots);
  if (HAS_TILES && !IS_PREFILL && !is_alone) return;   // it is in a query tile
  const int slot = *slots, position = tokens[POSITION * T + first], last = position + size - 1;
  const int start = WINDOW ? max(0, position - WINDOW + 1) / 16 : 0;   // first block
  auto token = [&](int r) { return IS_PREFILL ? begin + r : 0; };      // of the warp's row r
  auto element = [&](int t, int g) { return (((size_t)min(first + t, T - 1) * KV + head) * G + g) * D; };
  auto block = [&](int i) { return (size_t)table[slot * MAX_BLOCKS + i] * KV + head; };

  u32 queries[M][D / 16][4] = {};
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int step = 0; step < D / 16; step += 2)
      UNROLL for (int h = 0; h < HALVES; h++) {
        const int r = m * 16 + h * 8 + row;
        const u32* from = (const u32*)q + element(token(r), IS_PREFILL ? blockIdx.x % G : min(r, G - 1)) / 2;
        const uint4 x = ((const uint4*)from)[step * 2 + column];
        UNROLL for (int i = 0; i < 2; i++) {   // the order of K: bytes 0, 2, 1 and 3 of a word
          const u32 low = i ? x.z : x.x, high = i ? x.w : x.y;
          queries[m][step + i][h] = IS_BYTES ? __byte_perm(low, high, 0x5410) : low;
          queries[m][step + i][h + 2] = IS_BYTES ? __byte_perm(low, high, 0x7632) : high;
        }
      }
  float totals[M][D / 8][HALVES][2] = {}, highest[M][HALVES], sums[M][HALVES] = {};
  UNROLL for (int i = 0; i < M * HALVES; i++) highest[i / HALVES][i % HALVES] = LOWEST;

  // Adds block i of the context, K and V, to the totals
  auto add = [&](int i, const char* k, const char* v) {
    const int at = i * 16 + column * 4;   // the lane's first position
    float scores[M][2][4] = {};
    UNROLL for (int part = 0; part < D / 16; part++) {
      const int half = part % 2, from = (part / 2 * 16 + row / 2 * 4 + half * 2 + row % 2) * 4 + column;
      uint4 x;
      if (!IS_BYTES) x = ((const uint4*)k)[from];
      else {
        const uint2 words = ((const uint2*)k)[from];
        x = make_uint4(halves(words.x), halves(words.x >> 8), halves(words.y), halves(words.y >> 8));
      }
      UNROLL for (int m = 0; m < M; m++) {
        mma(scores[m][half], queries[m][part / 2 * 2], x.x, x.y);
        mma(scores[m][half], queries[m][part / 2 * 2 + 1], x.z, x.w);
      }
    }
    const float* own_scales = HAS_SCALES ? scales + block(i) * 32 + column * 4 : 0;
    u32 weights[M][4] = {};
    const bool sees_all = i * 16 + 15 <= position + token(0) && !WINDOW;   // every row sees every position
    float rescales[M][HALVES];
    bool changes = false;
    UNROLL for (int mh = 0; mh < M * HALVES; mh++) {
      const int m = mh / HALVES, h = mh % HALVES, visible = min(position + token(m * 16 + h * 8 + row), last);
      float x[4], high = highest[m][h], sum = 0;
      UNROLL for (int e = 0; e < 4; e++) {
        x[e] = scores[m][e / 2][h * 2 + e % 2] * (FACTOR * UNIT);
        if (HAS_SCALES) x[e] *= own_scales[e];
        // cap * tanh(score / cap); a larger exponent than 126 could overflow and changes nothing
        if (CAP) x[e] = 2 * CAP * LOG2_E / (1 + power_of_2(fminf(x[e] * (-2 / CAP), 126))) - CAP * LOG2_E;
        if (!sees_all && (at + e > visible || (WINDOW && at + e <= visible - WINDOW))) x[e] = LOWEST;   // may be NaN
        high = fmaxf(high, x[e]);
      }
      UNROLL for (int n = 1; n < 4; n *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, n));   // a row's lanes
      rescales[m][h] = power_of_2(highest[m][h] - high);
      changes |= high != highest[m][h];
      highest[m][h] = high;
      UNROLL for (int e = 0; e < 4; e++) {
        x[e] = power_of_2(x[e] - high);
        sum += x[e];
        if (HAS_SCALES) x[e] = at + e > last ? 0 : x[e] * (own_scales[16 + e] * SCALE_FACTOR);
      }
      sums[m][h] = sums[m][h] * rescales[m][h] + sum;
      weights[m][h] = pack(x[0], x[1]);
      weights[m][h + 2] = pack(x[2], x[3]);
    }
    if (__any_sync(~0u, changes))
      UNROLL for (int j = 0; j < M * D / 8 * HALVES * 2; j++)
        (&totals[0][0][0][0])[j] *= rescales[j / 2 / HALVES / (D / 8)][j / 2 % HALVES];
    u32 exists[2];   // unwritten positions may hold NaN
    for (int e = 0; e < 2; e++) exists[e] = at + e * 2 > last ? 0 : at + e * 2 == last ? 0xffff : ~0;
    UNROLL for (int n = 0; n < D / 8; n++) {
      u32 low, high;   // four positions of a dimension
      if (!IS_BYTES) {
        const uint2 x = ((const uint2*)v)[(n * 8 + row) * 4 + column];
        low = x.x & exists[0];
        high = x.y & exists[1];
      } else {
        const uint4 x = ((const uint4*)v)[(n / 4 * 8 + row) * 4 + column];
        low = halves(x.x >> n % 4 * 8 & 255 | (x.y >> n % 4 * 8 & 255) << 16);
        high = halves(x.z >> n % 4 * 8 & 255 | (x.w >> n % 4 * 8 & 255) << 16);
      }
      UNROLL for (int m = 0; m < M; m++) {
        float total[4] = {};
        UNROLL for (int e = 0; e < HALVES * 2; e++) total[e] = totals[m][n][e / 2][e % 2];
        mma(total, weights[m], low, high);
        UNROLL for (int e = 0; e < HALVES * 2; e++) totals[m][n][e / 2][e % 2] = total[e];
      }
    }
  };

  if (IS_PREFILL) {
    auto load = [&](int i, int buffer) {   // of STAGE blocks
      for (int n = threadIdx.x; n < STAGE * BLOCK / 16; n += THREADS) {
        const int j = n / (BLOCK / 16), c = n % (BLOCK / 16) * 16;
        if ((i + j) * 16 > last) break;
        copy_async(memory + (buffer * STAGE + j) * 2 * BLOCK + c, keys + block(i + j) * BLOCK + c);
        copy_async(memory + (buffer * STAGE + j) * 2 * BLOCK + BLOCK + c, values + block(i + j) * BLOCK + c);
      }
      commit_copies();
    };
    load(start, 0);
    for (int i = start, buffer = 0; i * 16 <= last; i += STAGE, buffer ^= 1) {
      load(i + STAGE, buffer ^ 1);
      wait_for_copies<1>();
      __syncthreads();
      const int until = min(last, position + begin + 16 * M - 1) / 16;   // last block that a row of the warp sees
      for (int j = is_shared ? warp : 0; j < STAGE && i + j <= until; j += is_shared ? WARPS : 1)
        add(i + j, memory + (buffer * STAGE + j) * 2 * BLOCK, memory + (buffer * STAGE + j) * 2 * BLOCK + BLOCK);
      __syncthreads();
    }
  } else for (int i = start + blockIdx.z * WARPS + warp; i * 16 <= last; i += SPLITS * WARPS)
    add(i, keys + block(i) * BLOCK, values + block(i) * BLOCK);

  float *means = (float*)memory, *weight_logs = means + WARPS * ROWS * D;
  UNROLL for (int mh = 0; mh < M * HALVES; mh++) {
    const int m = mh / HALVES, h = mh % HALVES, r = m * 16 + h * 8 + row;
    UNROLL for (int n = 1; n < 4; n *= 2) sums[m][h] += __shfl_xor_sync(~0u, sums[m][h], n);
    const float sum = fmaxf(sums[m][h], 1e-30f);
    if (r >= ROWS) continue;
    if (column == 0) weight_logs[warp * ROWS + r] = highest[m][h] + log2f(sum);
    UNROLL for (int i = 0; i < D / 4; i++) {
      const int n = i / 2, c = column * 2 + i % 2, d = IS_BYTES ? n / 4 * 32 + c * 4 + n % 4 : n * 8 + c;
      means[(warp * ROWS + r) * D + d] = totals[m][n][h][i % 2] * (FACTOR / SCALE_FACTOR) / sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (IS_PREFILL ? size : G) * D / 2; i += THREADS) {   // two dimensions
    const int r = i / (D / 2), d = i % (D / 2) * 2, from = is_shared ? 0 : r / ROWS, to = is_shared ? WARPS : from + 1;
    const int t = IS_PREFILL ? r : 0, g = IS_PREFILL ? blockIdx.x % G : r;
    const float sink = HAS_SINKS ? sinks[head * G + g] * LOG2_E : LOWEST;
    float high = sink, low_dimension = 0, high_dimension = 0;
    for (int w = from; w < to; w++) high = fmaxf(high, weight_logs[w * ROWS + r % ROWS]);
    float weight = HAS_SINKS ? power_of_2(sink - high) : 0;
    for (int w = from; w < to; w++) {
      const float x = power_of_2(weight_logs[w * ROWS + r % ROWS] - high);
      const float2 mean = *(float2*)(means + (w * ROWS + r % ROWS) * D + d);
      weight += x; low_dimension += mean.x * x; high_dimension += mean.y * x;
    }
    const size_t at = element(t, g) + d, split = (size_t)blockIdx.z * T * KV * G;
    if (SPLITS == 1) ((u32*)out)[at / 2] = pack(low_dimension / weight, high_dimension / weight);
    else ((float2*)out)[(split * D + at) / 2] = make_float2(low_dimension / weight, high_dimension / weight);
    if (SPLITS > 1 && d == 0) logs[split + at / D] = high + log2f(weight);
  }
}
