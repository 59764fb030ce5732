// Attention of prefill chunks on Hopper with warpgroup products (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608),
// without window, cap and sinks. attention.py has the layout of the cache, hopper.cuh has barriers.
//
// A work group has a query head and a query tile or, if they fit in 128 rows, all query heads of a K/V head. Two
// warpgroups multiply, each for 64 rows. Queries, scores and totals are in registers: the first product's results have
// the order of the second one's operand. The third warpgroup copies K and V to shared memory, in stages of D positions:
// K, K, V, K, V, ..., V. The products of a warpgroup run during the softmax of the other one.
//
// Rows of a stage, its positions, have the 128-byte swizzle: a chunk q of 16 bytes is stored at q ^ (row % 8). A row of
// 256 bytes is in two panels.
#define STAGE_BYTES (2 * D * D)
#define STAGES (7 * 128 * 128 / (D * D))

DEVICE void arrive_after_copies(u32 b) { PTX("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(b)); }

extern "C" __global__ void __launch_bounds__(384, 1) NAME(ARGUMENTS) {
  // A query tile is TILE * first token + number of further tokens
  const int tile = tokens[NUM_WORDS * T + gridDim.y - 1 - blockIdx.y], first = tile / TILE, size = tile % TILE + 1;
  const int heads = size * G <= 128 ? G : 1;   // that share the work group
  if (tile < 0 || blockIdx.x % heads) return;
  const u32 smem = address(memory) + 1023 & ~1023, bars = smem + STAGES * STAGE_BYTES;   // full, empty
  const int thread = threadIdx.x % 128, lane = thread % 32, column = lane % 4, group = threadIdx.x / 128;
  const int position = tokens[POSITION * T + first], last = position + size - 1, count = last / D + 1;   // stages of K
  if (threadIdx.x < STAGES * 2) init(bars + threadIdx.x * 8, threadIdx.x % 2 ? 8 : 128);
  PTX("fence.mbarrier_init.release.cluster;" ::);
  __syncthreads();
  int s = 0, phase = 0;
  auto next_stage = [&] { if (++s == STAGES) { s = 0; phase ^= 1; } };

  if (group == 2) {
    PTX("setmaxnreg.dec.sync.aligned.u32 56;" ::);
    // Its chunk of 64 dimensions of a block, without bank conflicts
    const int row = (thread & 4) + thread / 8 % 4 + thread / 32 % 2 * 8, part = thread / 64;
    const int to = row * 128 + (part * 4 + column ^ row % 8) * 16, blocks = tokens[SLOT * T + first] * MAX_BLOCKS;
    for (int i = 0; i < 2 * count; i++, next_stage()) {
      const bool is_v = i == 2 * count - 1 || (i && i % 2 == 0);
      const char* const from = (is_v ? values : keys) + (part * 16 + row) * 64 + column * 16;
      wait(bars + s * 16 + 8, phase ^ 1);
      _Pragma("unroll 4") for (int b = 0; b < D / 16; b++) {
        const int block = (is_v ? i - 1 : i + 1) / 2 * (D / 16) + b;
        const size_t at = (size_t)__ldg(table + blocks + min(block, last / 16)) * KV + blockIdx.x / G;
        UNROLL for (int n = 0; n < D / 64; n++)   // unwritten V may be NaN
          copy_async(memory + ((n * D + b * 16) * 128 + to + smem + s * STAGE_BYTES - address(memory)),
                     from + at * (D * 32) + n * 2048, block * 16 + row <= last ? 16 : 0);
      }
      arrive_after_copies(bars + s * 16);
    }
    return;
  }

  PTX("setmaxnreg.inc.sync.aligned.u32 224;" ::);
  const int row = group * 64 + thread / 32 * 16 + lane / 4;   // and row + 8
  u32 queries[D / 16][4], weights[D / 16][4], at[2];   // at: words of q and out
  float scores[D / 2], totals[D / 2] = {}, highest[2] = {LOWEST, LOWEST}, sums[2] = {}, rescales[2];
  auto token = [&](int h) { return heads == 1 ? row + h * 8 : (row + h * 8) / G; };
  UNROLL for (int h = 0; h < 2; h++)
    at[h] = (min(first + token(h), T - 1) * KV * G + blockIdx.x + row + h * 8 - token(h) * heads) * (D / 2) + column;
  UNROLL for (int i = 0; i < D / 4; i++) queries[i / 4][i % 4] = ((const u32*)q)[at[i % 2] + i / 2 * 4];
  auto multiply = [&](bool is_v) {   // starts scores = queries @ K.T or totals += weights @ V
    const u64 descriptor = 1ull << 62 | 64ull << 32 | D * 8ull << 16 | (smem + s * STAGE_BYTES) >> 4;
    PTX("fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;" ::);
    UNROLL for (int i = 0; i < D / 16; i++)
      if (is_v) wgmma<true>(totals, weights[i], descriptor + i * 128, true);
      else wgmma(scores, queries[i], descriptor + i / 4 * D * 8 + i % 4 * 2, i);
    PTX("wgmma.commit_group.sync.aligned;" ::);
    next_stage();
  };
  auto release = [&](int n) { if (lane == 0) arrive(bars + (s + STAGES - n) % STAGES * 16 + 8, 0); };   // n stages ago
  wait(bars + s * 16, phase);
  multiply(false);
  PTX("wgmma.wait_group.sync.aligned 0;" ::);
  release(1);
  for (int i = 0; i < count; i++) {
    if (i * D + D - 1 > position + (heads == 1 ? group * 64 : 0))
      UNROLL for (int n = 0; n < D / 2; n++)   // hidden ones may be NaN
        if (i * D + n / 4 * 8 + column * 2 + n % 2 > position + token(n / 2 % 2)) scores[n] = LOWEST;
    UNROLL for (int h = 0; h < 2; h++) {
      float high = LOWEST, sum = 0;
      UNROLL for (int n = h * 2; n < D / 2; n += n % 2 ? 3 : 1) high = fmaxf(high, scores[n]);
      UNROLL for (int lanes = 1; lanes < 4; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, lanes));
      high = fmaxf(highest[h], high * UNIT);
      UNROLL for (int n = h * 2; n < D / 2; n += n % 2 ? 3 : 1) sum += scores[n] = power_of_2(scores[n] * UNIT - high);
      rescales[h] = power_of_2(highest[h] - high);
      sums[h] = sums[h] * rescales[h] + sum;
      highest[h] = high;
    }
    wait(bars + s * 16, phase ^ (sums[0] + sums[1] < 0));   // false, but keeps the softmax before the next wait
    PTX("wgmma.wait_group.sync.aligned 0;" ::);
    if (i) release(1);
    UNROLL for (int n = 0; n < D / 2; n++) totals[n] *= rescales[n / 2 % 2];
    UNROLL for (int n = 0; n < D / 4; n++) weights[n / 4][n % 4] = pack(scores[n * 2], scores[n * 2 + 1]);
    if (i + 1 == count) break;
    if (i || group) PTX("bar.sync %0, 256;" :: "r"(1 + group));   // the warpgroups take turns
    multiply(false);
    wait(bars + s * 16, phase);
    multiply(true);
    PTX("bar.arrive %0, 256;" :: "r"(2 - group));
    PTX("wgmma.wait_group.sync.aligned 1;" ::);
    release(2);
  }
  multiply(true);
  PTX("wgmma.wait_group.sync.aligned 0;" ::);
  UNROLL for (int n = 0; n < 4; n++) sums[n % 2] += __shfl_xor_sync(~0u, sums[n % 2], n / 2 + 1);   // of a row's lanes
  const float factors[2] = {1 / sums[0], 1 / sums[1]};
  UNROLL for (int n = 0; n < D / 4; n++) if (token(n % 2) < size)
    ((u32*)out)[at[n % 2] + n / 2 * 4] = pack(totals[n * 2] * factors[n % 2], totals[n * 2 + 1] * factors[n % 2]);
}
