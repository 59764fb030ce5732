// out = x @ W.T + bias on a CPU. IS_INT: int8 products for W in int8 or int4 (models/storage_order.py, `pack_words`),
// else products of floats. A core first copies a block of rows of x or, for IS_INT, quantizes it to int8, in groups of
// X_GROUP inputs with a scale each: their integer sums are exact. DOT multiplies 4 inputs of LANES outputs, W's
// unsigned and x's signed, and adds them to int32 sums. Inline assembly needs no headers, and no builtins that differ
// by version. A sum begins at START times the sum of x: W holds q + 128.
#define START (BITS == 8 ? -128 : 0)
#if defined(__AVX512VNNI__) || defined(__AVX512F__) && !IS_INT
#define LANES 16
#define DOT(sum, w, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x))
#elif defined(__AVXVNNI__)
#define LANES 8
#define DOT(sum, w, x) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x))
#elif defined(__AVX2__)   // vpmaddubsw would saturate: multiply inputs 0 and 2, then 1 and 3, as int16
#define LANES 8
#define MAC(sum, w, x) ({ i32 y; __asm__("vpmaddwd %2, %1, %0" : "=x"(y) : "x"(w), "x"(x)); sum += y; })
#define DOT(sum, w, x) ({ MAC(sum, (w) & 0xff00ff, (i16)(x) << 8 >> 8); MAC(sum, (w) >> 8 & 0xff00ff, (i16)(x) >> 8); })
#elif defined(__ARM_FEATURE_DOTPROD)   // multiplies signed numbers: q, without the 128
#define LANES 4
#undef START
#define START 0
#define SIGNED(w) (BITS == 8 ? (w) ^ (int)0x80808080 : (w))
#define DOT(sum, w, x) __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(SIGNED(w)), "w"(x))
#else
#define LANES 4
#define BYTE(w, x, i) ((w) >> i & 255) * ((x) << (24 - i) >> 24)
#define DOT(sum, w, x) sum += BYTE(w, x, 0) + BYTE(w, x, 8) + BYTE(w, x, 16) + BYTE(w, x, 24)
#endif
typedef float f32 __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int i32 __attribute__((vector_size(LANES * 4), aligned(4)));
typedef SCALE scale_lanes __attribute__((vector_size(LANES * sizeof(SCALE)), aligned(sizeof(SCALE))));
typedef OFFSET offset_lanes __attribute__((vector_size(LANES * sizeof(OFFSET)), aligned(sizeof(OFFSET))));
typedef short i16 __attribute__((vector_size(LANES * 4)));
#define EACH(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < count; i++)
#define FLOATS(type, p) __builtin_convertvector(*(const type *)(p), f32)
// Rows of x and vectors of outputs whose sums fill the registers, and outputs per step
#define HIGH ((LANES == 8 ? 2 : 4) * (IS_INT ? 1 : 2))
#define WIDE (IS_GATED || LANES < 16 && (IS_INT || N % 24) ? 2 : N % (LANES * 3) == 0 ? 3 : N % 32 == 0 ? 2 : 1)
#define OUTPUTS (WIDE * LANES / (1 + IS_GATED))
#define WIDTH (N / (1 + IS_GATED))   // of a row of out
#define STEPS (WIDTH / OUTPUTS)

#if !IS_INT
typedef WEIGHT weight_lanes __attribute__((vector_size(LANES * sizeof(WEIGHT)), aligned(sizeof(WEIGHT))));
typedef unsigned short f16_bits __attribute__((vector_size(LANES * 2)));
typedef _Float16 f16 __attribute__((vector_size(LANES * 2)));
typedef struct { float x[K]; } Row;

// The numbers of input k, see NumberFormat.value
static inline f32 decode(weight_lanes w, int k) {
#if BITS < 16
  f16_bits bits = __builtin_convertvector(BITS == 4 ? w >> k % 8 * 4 & 15 : w, f16_bits);
  if (!IS_FLOAT) return BITS == 4 ? __builtin_convertvector(bits, f32) : __builtin_convertvector(w, f32);
  bits = BITS == 4 ? (bits & 7) << 9 | (bits & 8) << 12 : (bits & 127) << 7 | (bits & 128) << 8;
  return __builtin_convertvector((f16)bits, f32);
#endif
  return __builtin_convertvector(w, f32);
}
static void quantize(Row *row, const float *x) { for (int k = 0; k < K; k++) row->x[k] = x[k]; }
#else
typedef struct { signed char q[K]; float scale[K / X_GROUP]; int sum[K / X_GROUP]; } Row;

static void quantize(Row *row, const float *x) {
  for (int g = 0; g < K / X_GROUP; g++, x += X_GROUP) {
    int largest = 0, sum = 0;
    EACH(i, X_GROUP) {   // positive floats are ordered like their bits
      int bits = __builtin_bit_cast(int, x[i]) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    float limit = __builtin_bit_cast(float, largest), factor = largest ? 127.0f / limit : 0;
    EACH(i, X_GROUP) {
      float y = x[i] * factor;   // a statement of its own, so that the product is rounded, as in numpy
      row->q[g * X_GROUP + i] = (signed char)__builtin_bit_cast(int, y + 12582912.0f);   // 1.5 * 2**23: rounds to int
      sum += row->q[g * X_GROUP + i];
    }
    row->scale[g] = limit / 127.0f;
    row->sum[g] = sum;
  }
}
#endif

// Compute R rows by WIDE vectors of outputs, from `first`. With an activation, the second half of the vectors is up's
static inline __attribute__((always_inline)) void tile(const int R, long first, const long *targets, const Row *rows,
    float *out, const unsigned *weight, const SCALE *scale, const OFFSET *offset, const float *bias) {
  f32 total[8][8];
  long o[8];
  EACH(c, WIDE) o[c] = first + (IS_GATED && c >= WIDE / 2 ? N / 2 + (c - WIDE / 2) * LANES : c * LANES);
  EACH(r, R) EACH(c, WIDE) total[r][c] = (f32){};
#if !IS_INT
  for (int k = 0; k < K; k++) {
    f32 w[8];
    EACH(c, WIDE) {
      const WEIGHT *from = (const WEIGHT *)weight + (o[c] / 16 * K + k) / (BITS == 4 ? 8 : 1) * 16 + o[c] % 16;
      const long at = (o[c] / 16 * GROUPS + k / (K / GROUPS)) * 16 + o[c] % 16;
      if (BLOCK_ROWS <= HIGH) __builtin_prefetch((const char *)from + 4096);   // W is read once
      w[c] = decode(*(const weight_lanes *)from, k);
      if (HAS_SCALE) w[c] = w[c] * FLOATS(scale_lanes, scale + at);
      if (HAS_OFFSET) w[c] = w[c] + FLOATS(offset_lanes, offset + at);
    }
    EACH(r, R) EACH(c, WIDE) total[r][c] += w[c] * rows[r].x[k];
  }
#else
  _Pragma("clang loop unroll(disable)") for (int g = 0; g < K / X_GROUP; g++) {
    i32 sums[4][8];
    EACH(r, R) EACH(c, WIDE) sums[r][c] = (i32){} + START * rows[r].sum[g];
    EACH(j, X_GROUP / 4) EACH(c, WIDE) {
      const unsigned *at = weight + ((o[c] / 16 * K + g * X_GROUP) * BITS / 32 + j * BITS / 8) * 16 + o[c] % 16;
      if (R == 1) __builtin_prefetch(at + 1024);   // W is read once
      i32 w = BITS == 8 ? *(const i32 *)at : *(const i32 *)at >> j % 2 * 4 & 0x0f0f0f0f;
      EACH(r, R) DOT(sums[r][c], w, (i32){} + *(const int *)(rows[r].q + g * X_GROUP + j * 4));
    }
    EACH(c, WIDE) EACH(r, R) {
      long at = (o[c] / 16 * GROUPS + g * X_GROUP / (K / GROUPS)) * 16 + o[c] % 16;
      total[r][c] += __builtin_convertvector(sums[r][c], f32) * (FLOATS(scale_lanes, scale + at) * rows[r].scale[g]);
      if (HAS_OFFSET) total[r][c] += FLOATS(offset_lanes, offset + at) * (rows[r].scale[g] * (float)rows[r].sum[g]);
    }
  }
#endif
  EACH(r, R) {
    float values[8 * LANES], *to = out + targets[r] * WIDTH + first % WIDTH;   // a copy: `total` stays in registers
    EACH(c, WIDE) *(f32 *)(values + c * LANES) = total[r][c] + (HAS_BIAS ? *(const f32 *)(bias + o[c]) : (f32){});
    for (int i = 0; i < WIDE * LANES / (1 + IS_GATED); i++)
      to[i] = IS_GATED ? ACTIVATED(values[i]) * values[WIDE * LANES / 2 + i] : values[i];
  }
}
#define TILE(R) tile(R, first, targets + t, rows + t, (void *)out, (void *)weight, (void *)scale, (void *)offset, bias)

// A core computes one of ROW_PARTS parts of the BLOCKS blocks of rows times one of OUTPUT_PARTS parts of the outputs. A
// block is a group of rows with the same expert, or BLOCK_ROWS consecutive rows
void NAME(ARGUMENTS, int core_id) {
  Row *rows = (Row *)scratch + (long)core_id * BLOCK_ROWS;
  long targets[BLOCK_ROWS], count, row_part = core_id % ROW_PARTS, part = core_id / ROW_PARTS;
  for (long block = BLOCKS * row_part / ROW_PARTS; block < BLOCKS * (row_part + 1) / ROW_PARTS; block++) {
    const int *group = row_groups + block * ROW_GROUP;
    for (count = 0; count < BLOCK_ROWS; count++) {
      long target = !HAS_ROW_GROUPS ? block * BLOCK_ROWS + count : ROW_GROUP > 1 ? group[1 + count] : block;
      if (target < 0 || target >= ROWS_OUT) break;   // a missing row, as all after it
      quantize(rows + count, (const float *)x + target / (ROWS_OUT / T) * K);
      targets[count] = target;
    }
    for (long step = STEPS * part / OUTPUT_PARTS; step < STEPS * (part + 1) / OUTPUT_PARTS; step++) {
      long first = (HAS_ROW_GROUPS ? (long)(group[0] % EXPERTS) * N : 0) + step * OUTPUTS, t = 0;
      for (; t + HIGH <= count; t += HIGH) TILE(HIGH);
      for (; t + 4 <= count; t += 4) TILE(4);
      for (; t + 2 <= count; t += 2) TILE(2);
      for (; t < count; t++) TILE(1);
    }
  }
}
