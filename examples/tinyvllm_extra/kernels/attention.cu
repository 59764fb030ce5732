// Paged attention on tensor cores (FlashAttention-2, Dao 2023, arXiv:2307.08691): a warp multiplies 16 M query rows by
// 16 positions, a block of the context, and the scores stay in registers to weight V. attention.py has its layout.
//
// Decode: a work group has a token and a K/V head, and the rows are its G query heads. Its warps, and with split-KV the
// work groups of all splits, share the context. Prefill: a work group has a query head and a query tile, with 16 M
// tokens per warp. For a tile of up to 16 M tokens, the warps share the context. Stages of K and V, STAGE blocks of the
// work group or, for decode, one of each warp, are copied to shared memory during the products of the stage before.
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

extern "C" __global__ void __launch_bounds__(THREADS) NAME(ARGUMENTS) {
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
  // Eight dimensions of K or V, from 32 part + 8 column, of a position. Bytes of a word are in the order of queries
  auto load = [&](const char* from, int part, int half) {
    const int at = (part * 16 + row / 2 * 4 + half * 2 + row % 2) * 4 + column;
    if (!IS_BYTES) return ((const uint4*)from)[at];
    const uint2 words = ((const uint2*)from)[at];
    return make_uint4(halves(words.x), halves(words.x >> 8), halves(words.y), halves(words.y >> 8));
  };
  float totals[M][D / 8][HALVES][2] = {}, highest[M][HALVES], sums[M][HALVES] = {};
  UNROLL for (int i = 0; i < M * HALVES; i++) highest[i / HALVES][i % HALVES] = LOWEST;

  // Adds block i of the context, K and V, to the totals
  auto add = [&](int i, const char* k, const char* v) {
    const int at = i * 16 + column * 4;   // the lane's first position
    float scores[M][2][4] = {};
    UNROLL for (int part = 0; part < D / 16; part++) {
      const uint4 x = load(k, part / 2, part % 2);
      UNROLL for (int m = 0; m < M; m++) {
        mma(scores[m][part % 2], queries[m][part / 2 * 2], x.x, x.y);
        mma(scores[m][part % 2], queries[m][part / 2 * 2 + 1], x.z, x.w);
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
      const uint4 x[2] = {load(v, n / 4, 0), load(v, n / 4, 1)};
      // Four positions of a dimension
      const u32 low = transposed((&x[0].x)[n % 4]) & exists[0], high = transposed((&x[1].x)[n % 4]) & exists[1];
      UNROLL for (int m = 0; m < M; m++) {
        float total[4] = {};
        UNROLL for (int e = 0; e < HALVES * 2; e++) total[e] = totals[m][n][e / 2][e % 2];
        mma(total, weights[m], low, high);
        UNROLL for (int e = 0; e < HALVES * 2; e++) totals[m][n][e / 2][e % 2] = total[e];
      }
    }
  };

  char* const stages = memory + (IS_PREFILL ? 0 : warp * 4 * BLOCK);
  auto stage = [&](int buffer, int j) { return stages + (buffer * STAGE + j) * 2 * BLOCK; };   // its j-th block
  auto copy = [&](int i, int buffer) {
    for (int n = IS_PREFILL ? threadIdx.x : lane; n < STAGE * BLOCK / 16; n += IS_PREFILL ? THREADS : 32) {
      const int j = n / (BLOCK / 16), c = n % (BLOCK / 16) * 16;
      if ((i + j) * 16 > last) break;
      copy_async(stage(buffer, j) + c, keys + block(i + j) * BLOCK + c);
      copy_async(stage(buffer, j) + BLOCK + c, values + block(i + j) * BLOCK + c);
    }
    commit_copies();
  };
  auto synchronize = [] { if (IS_PREFILL) __syncthreads(); else __syncwarp(); };
  const int from = IS_PREFILL ? start : start + blockIdx.z * WARPS + warp, step = IS_PREFILL ? STAGE : SPLITS * WARPS;
  copy(from, 0);
  for (int i = from, buffer = 0; i * 16 <= last; i += step, buffer ^= 1) {
    copy(i + step, buffer ^ 1);
    wait_for_copies<1>();
    synchronize();
    const int until = min(last, position + begin + 16 * M - 1) / 16;   // last block that a row of the warp sees
    for (int j = IS_PREFILL && is_shared ? warp : 0; j < STAGE && i + j <= until; j += is_shared ? WARPS : 1)
      add(i + j, stage(buffer, j), stage(buffer, j) + BLOCK);
    synchronize();
  }
  __syncthreads();

  float *means = (float*)memory, *weight_logs = means + WARPS * ROWS * D;
  UNROLL for (int mh = 0; mh < M * HALVES; mh++) {
    const int m = mh / HALVES, h = mh % HALVES, r = m * 16 + h * 8 + row;
    UNROLL for (int n = 1; n < 4; n *= 2) sums[m][h] += __shfl_xor_sync(~0u, sums[m][h], n);
    const float sum = fmaxf(sums[m][h], 1e-30f);
    if (r >= ROWS) continue;
    if (column == 0) weight_logs[warp * ROWS + r] = highest[m][h] + log2f(sum);
    UNROLL for (int i = 0; i < D / 4; i++) {   // the dimensions of `load`
      const int d = i / 8 * 32 + column * 8 + (IS_BYTES ? i / 4 % 2 * 4 + i % 2 * 2 + i / 2 % 2 : i % 8);
      means[(warp * ROWS + r) * D + d] = totals[m][i / 2][h][i % 2] * (FACTOR / SCALE_FACTOR) / sum;
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
