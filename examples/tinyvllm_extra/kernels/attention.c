// Paged attention on a CPU (Dao et al. 2022, arXiv:2205.14135). A tile is one token or up to TILE consecutive tokens of
// a sequence, of a prompt or drafts. A core computes it for a K/V head: its rows, G for each token, share a copy of K
// and V, STEP positions at a time. Steps begin at multiples of STEP, and masked positions change nothing, so that a
// row's result depends neither on other rows nor on the chunks of its prompt.
#define WIDTH(n) ((n + LANES - 1) / LANES * LANES)   // of a copied row of n numbers: whole vectors
#define MAX_ROWS (TILE * G + ROWS)   // more than a tile has, since each product has ROWS rows
typedef float f32 __attribute__((vector_size(LANES * 4), aligned(4)));

// A number of the cache, see attention.unpack
static inline float number(ELEMENT x) {
  const unsigned short bits = ((int)x & 127) << 7 | ((int)x & 128) << 8;
  return sizeof(x) > 1 ? (float)x : HAS_SCALES ? (float)x - 128 : (float)__builtin_bit_cast(_Float16, bits) * 256;
}

// Compute x @ w or, with factors of rows, to * factors + x @ w. count, width: rows and columns of w
static inline __attribute__((always_inline)) void multiply(int rows, float *to, const float *factors, const float *x,
    const int x_width, const float *w, const int width, int count) {
  for (int c = 0; c < width; c += LANES) for (int r = 0; r < rows; r += ROWS) {
    f32 sums[ROWS];
    for (int i = 0; i < ROWS; i++) sums[i] = factors ? *(f32 *)(to + (r + i) * width + c) * factors[r + i] : (f32){};
    for (int k = 0; k < count; k++)
      for (int i = 0; i < ROWS; i++) sums[i] += *(const f32 *)(w + k * width + c) * x[(r + i) * x_width + k];
    for (int i = 0; i < ROWS; i++) *(f32 *)(to + (r + i) * width + c) = sums[i];
  }
}

// The tile's row r in q and out
#define ROW(r) ((((t + (r) / G) * KV + h) * G + (r) % G) * D)

// Without the attribute, clang splits vectors of 512 bits
__attribute__((min_vector_width(512))) void NAME(ARGUMENTS, int core_id) {
  const int *slots = tokens + SLOT * T, *positions = tokens + POSITION * T;
  float query[MAX_ROWS * D], scores[MAX_ROWS * WIDTH(STEP)], total[MAX_ROWS * WIDTH(D)];
  float k[D][WIDTH(STEP)], v[STEP][WIDTH(D)], sums[MAX_ROWS], highest[MAX_ROWS], factors[MAX_ROWS];
  for (long t = 0, count, item = 0; t < T; t += count) {
    for (count = 1; t + count < T && count < TILE && slots[t + count] == slots[t]; count++);
    const int *blocks = table + (long)slots[t] * MAX_BLOCKS, rows = count * G, last = positions[t + count - 1];
    for (int h = 0; h < KV; h++) if (item++ % CORES == core_id) {
      for (int r = 0; r < rows; r++) {
        for (int d = 0; d < D; d++) query[r * D + d] = ((const float *)q)[ROW(r) + d] * UNIT;
        for (int d = 0; d < WIDTH(D); d++) total[r * WIDTH(D) + d] = 0;
        highest[r] = HAS_SINKS ? sinks[h * G + r % G] * LOG2_E : LOWEST / 10;   // LOWEST has weight 0
        sums[r] = HAS_SINKS;
      }
      int first = WINDOW && positions[t] > WINDOW ? (positions[t] - WINDOW) / STEP * STEP : 0;
      for (; first <= last; first += STEP) {
        const int end = last - first < STEP ? last - first + 1 : STEP;
        for (int i = 0; i < end; i += BLOCK_SIZE) {   // copy a block of K and V
          const long block = (long)blocks[(first + i) / BLOCK_SIZE] * KV + h, at = block * D * BLOCK_SIZE;
          const float *scale = scales + block * 2 * BLOCK_SIZE;
          for (int d = 0; d < D; d++) _Pragma("clang loop unroll(disable)") for (int j = 0; j < BLOCK_SIZE; j++)
            k[d][i + j] = number(((const ELEMENT *)keys)[at + d * BLOCK_SIZE + j]) * (HAS_SCALES ? scale[j] : 1);
          for (int j = 0; j < BLOCK_SIZE; j++) for (int d = 0; d < D; d++)
            v[i + j][d] = number(((const ELEMENT *)values)[at + j * D + d]) * (HAS_SCALES ? scale[BLOCK_SIZE + j] : 1);
        }
        multiply(rows, scores, 0, query, D, k[0], WIDTH(STEP), D);
        for (int r = 0; r < rows; r++) for (int i = 0; i < WIDTH(STEP); i++) {   // unwritten positions may hold NaN
          float *x = scores + r * WIDTH(STEP) + i;
          const int distance = positions[t + r / G] - first - i;
          if (CAP) *x = 2 * CAP * LOG2_E / (1 + tv_exp2(*x * (-2 / CAP))) - CAP * LOG2_E;   // see attention.add_scores
          if (i >= STEP || distance < 0 || WINDOW && distance >= WINDOW) *x = LOWEST;
        }
        for (int r = 0; r < rows; r++) {   // online softmax
          #pragma float_control(precise, off)   // vectorizes maximum and sum
          float *x = scores + r * WIDTH(STEP), high = highest[r];
          for (int i = 0; i < WIDTH(STEP); i++) high = __builtin_fmaxf(high, x[i]);
          factors[r] = tv_exp2(highest[r] - high);
          highest[r] = high;
          sums[r] *= factors[r];
          for (int i = 0; i < WIDTH(STEP); i++) sums[r] += x[i] = tv_exp2(x[i] - high);
        }
        multiply(rows, total, factors, scores, WIDTH(STEP), v[0], WIDTH(D), end);
      }
      for (int r = 0; r < rows; r++)
        for (int d = 0; d < D; d++) ((float *)out)[ROW(r) + d] = total[r * WIDTH(D) + d] / sums[r];
    }
  }
}
