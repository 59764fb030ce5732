// out = x @ W.T + bias on a CPU. IS_INT: int8 products for W in int8 or int4 (models/matrices.py, `pack_numbers`),
// else products of floats. A core first copies a block of rows of x or, for IS_INT, quantizes it to int8, in groups of
// X_GROUP inputs with a scale each: their integer sums are exact. Then it multiplies all rows by DEPTH inputs of a few
// outputs, so that its first-level cache holds both; floats of W are first decoded to a panel. DOT multiplies 4 inputs
// of LANES outputs, W's unsigned and x's signed, and adds them to int32 sums. Inline assembly needs no headers, and no
// builtins that differ by version. A sum begins at START times the sum of x: W holds q + 128.
#define START (BITS == 8 ? -128 : 0)
#define SIGNED(w) (BITS == 8 ? (w) ^ (int)0x80808080 : (w))   // q, without the 128
#if defined(__AVX512VNNI__) || defined(__AVX512F__) && !IS_INT
#define LANES 16
#define DOT(sum, w, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x))
#elif defined(__AVXVNNI__)
#define LANES 8
#define DOT(sum, w, x) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x))
#elif defined(__AVX2__)   // multiplies W's absolute values by x with W's signs: sums of two products fit in int16
#define LANES 8
#undef START
#define START 0
#define OP(name, to, x, y) __asm__(name " %2, %1, %0" : "=x"(to) : "x"(x), "x"(y))
#define DOT(sum, w, x) ({ i32 y, z; OP("vpsignb", y, x, SIGNED(w)); OP("vpsignb", z, SIGNED(w), SIGNED(w)); \
  OP("vpmaddubsw", y, z, y); OP("vpmaddwd", y, y, (i32){} + 0x10001); sum += y; })
#elif defined(__ARM_FEATURE_DOTPROD)   // multiplies signed numbers
#define LANES 4
#undef START
#define START 0
#define DOT(sum, w, x) __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(SIGNED(w)), "w"(x))
#else
#define LANES 4
#define BYTE(w, x, i) ((w) >> i & 255) * ((x) << (24 - i) >> 24)
#define DOT(sum, w, x) sum += BYTE(w, x, 0) + BYTE(w, x, 8) + BYTE(w, x, 16) + BYTE(w, x, 24)
#endif
typedef float f32 __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int i32 __attribute__((vector_size(LANES * 4), aligned(4)));
#define EACH(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < count; i++)
#define VECTORS __attribute__((min_vector_width(LANES * 32)))   // else clang splits those of 512 bits
// A vector of numbers in memory, and these numbers in float32
#define LOAD(type, p) ({ type x __attribute__((vector_size(LANES * sizeof(type)))); \
  __builtin_memcpy(&x, p, sizeof(x)); x; })
#define FLOATS(type, p) __builtin_convertvector(LOAD(type, p), f32)
// Rows of x and vectors of outputs whose sums fill the registers, and outputs per step
#define HIGH (LANES == 8 ? 4 : 8)
#define WIDE (IS_GATED || LANES < 16 && (IS_INT || N % 24) ? 2 : N % (LANES * 3) == 0 ? 3 : N % 32 == 0 ? 2 : 1)
#define HAS_PANEL (!IS_INT && BLOCK_ROWS > HIGH)
#define DEPTH (BLOCK_ROWS <= HIGH ? K : IS_INT ? 256 : 64)
#define OUTPUTS (WIDE * LANES / (1 + IS_GATED))
#define WIDTH (N / (1 + IS_GATED))   // of a row of out
#define STEPS (WIDTH / OUTPUTS)

typedef unsigned short f16_bits __attribute__((vector_size(LANES * 2)));
typedef _Float16 f16 __attribute__((vector_size(LANES * 2)));
// Numbers of x, with a gap, as rows in the same sets of the first-level cache are slower, or their integers with scales
// and sums of groups
#define INTS (IS_INT * K)
typedef struct { float x[K - INTS + 16], scale[INTS / X_GROUP]; int sum[INTS / X_GROUP]; signed char q[INTS]; } Row;

// The numbers of input k of LANES outputs, see NumberFormat.value
static inline f32 decode(const unsigned *weight, const SCALE *scale, const OFFSET *offset, long output, int k) {
  const WEIGHT *from = (const WEIGHT *)weight + (output / 16 * K + k) / (BITS == 4 ? 8 : 1) * 16 + output % 16;
  const long at = (output / 16 * GROUPS + k / (K / GROUPS)) * 16 + output % 16;
  const __auto_type stored = LOAD(WEIGHT, from);
  if (k % 2 == 0) __builtin_prefetch((const char *)from + 4096);
  f32 w = __builtin_convertvector(stored, f32);
#if BITS < 16
  f16_bits bits = __builtin_convertvector(BITS == 4 ? stored >> k % 8 * 4 & 15 : stored, f16_bits);
  if (BITS == 4) w = __builtin_convertvector(bits, f32);
  bits = BITS == 4 ? (bits & 7) << 9 | (bits & 8) << 12 : (bits & 127) << 7 | (bits & 128) << 8;
  if (IS_FLOAT) w = __builtin_convertvector((f16)bits, f32);
#endif
  if (HAS_SCALE) w = w * FLOATS(SCALE, scale + at);
  return HAS_OFFSET ? w + FLOATS(OFFSET, offset + at) : w;
}

static VECTORS void quantize(Row *row, const float *x) {
  for (int k = 0; k < K - INTS; k++) row->x[k] = x[k];
  for (int g = 0; g < INTS / X_GROUP; g++, x += X_GROUP) {
    int largest = 0, sum = 0;
    for (int i = 0; i < X_GROUP; i++) {   // positive floats are ordered like their bits
      int bits = __builtin_bit_cast(int, x[i]) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    float limit = __builtin_bit_cast(float, largest), factor = largest ? 127.0f / limit : 0;
    for (int i = 0; i < X_GROUP; i++) {
      float y = x[i] * factor;   // a statement of its own, so that the product is rounded, as in numpy
      row->q[g * X_GROUP + i] = (signed char)__builtin_bit_cast(int, y + 12582912.0f);   // 1.5 * 2**23: rounds to int
      sum += row->q[g * X_GROUP + i];
    }
    row->scale[g] = limit / 127.0f;
    row->sum[g] = sum;
  }
}

// Add the products of inputs begin to end to the sums of R rows by WIDE vectors of outputs, which are at o
static inline __attribute__((always_inline)) void tile(const int R, int begin, int end, const long *o, const Row *rows,
    f32 *sums, const f32 *panel, const unsigned *weight, const SCALE *scale, const OFFSET *offset) {
  f32 total[8][8];
  EACH(r, R) EACH(c, WIDE) total[r][c] = sums[r * WIDE + c];
  _Pragma("clang loop unroll_count(2)") for (int k = begin; !IS_INT && k < end; k++) {
    f32 w[8];
    EACH(c, WIDE) w[c] = HAS_PANEL ? panel[(k - begin) * WIDE + c] : decode(weight, scale, offset, o[c], k);
    EACH(r, R) EACH(c, WIDE) total[r][c] += w[c] * rows[r].x[k];
  }
  EACH(r, R) EACH(c, WIDE) sums[r * WIDE + c] = total[r][c];
  _Pragma("clang loop unroll(disable)") for (int g = begin / X_GROUP; IS_INT && g < end / X_GROUP; g++) {
    i32 dots[8][8];   // fill the registers: sums stay in memory
    EACH(r, R) EACH(c, WIDE) dots[r][c] = (i32){} + START * rows[r].sum[g];
    EACH(j, X_GROUP / 4) EACH(c, WIDE) {
      const unsigned *at = weight + ((o[c] / 16 * K + g * X_GROUP) * BITS / 32 + j * BITS / 8) * 16 + o[c] % 16;
      __builtin_prefetch(at + 1024);
      i32 w = BITS == 8 ? *(const i32 *)at : *(const i32 *)at >> j % 2 * 4 & 0x0f0f0f0f;
      EACH(r, R) DOT(dots[r][c], w, (i32){} + *(const int *)(rows[r].q + g * X_GROUP + j * 4));
    }
    EACH(c, WIDE) EACH(r, R) {
      long at = (o[c] / 16 * GROUPS + g * X_GROUP / (K / GROUPS)) * 16 + o[c] % 16;
      f32 w = FLOATS(SCALE, scale + at), *sum = sums + r * WIDE + c;
      *sum += __builtin_convertvector(dots[r][c], f32) * (w * rows[r].scale[g]);
      if (HAS_OFFSET) *sum += FLOATS(OFFSET, offset + at) * (rows[r].scale[g] * (float)rows[r].sum[g]);
    }
  }
}
#define TILES(R) for (; t + R <= count; t += R) \
  tile(R, k, end, o, rows + t, sums + t * WIDE, panel, (void *)weight, (void *)scale, (void *)offset);

// A core computes one of ROW_PARTS parts of the BLOCKS blocks of rows times one of OUTPUT_PARTS parts of the outputs. A
// block is a group of rows with the same expert, or BLOCK_ROWS consecutive rows
VECTORS void NAME(ARGUMENTS, int core_id) {
  Row *rows = (Row *)scratch + (long)core_id * BLOCK_ROWS;
  __attribute__((aligned(64))) f32 sums[BLOCK_ROWS * WIDE], panel[HAS_PANEL ? DEPTH * WIDE : 1];
  long targets[BLOCK_ROWS], o[WIDE], count, row_part = core_id % ROW_PARTS, part = core_id / ROW_PARTS;
  for (long block = BLOCKS * row_part / ROW_PARTS; block < BLOCKS * (row_part + 1) / ROW_PARTS; block++) {
    const int *group = row_groups + block * ROW_GROUP;
    for (count = 0; count < BLOCK_ROWS; count++) {
      long target = !HAS_ROW_GROUPS ? block * BLOCK_ROWS + count : ROW_GROUP > 1 ? group[1 + count] : block;
      if (target < 0 || target >= ROWS_OUT) break;   // a missing row, as all after it
      quantize(rows + count, (const float *)x + target / (ROWS_OUT / T) * K);
      targets[count] = target;
    }
    for (long step = STEPS * part / OUTPUT_PARTS; step < STEPS * (part + 1) / OUTPUT_PARTS; step++) {
      long first = (HAS_ROW_GROUPS ? (long)(group[0] % EXPERTS) * N : 0) + step * OUTPUTS;
      // With an activation, the second half of the vectors is up's
      EACH(c, WIDE) o[c] = first + (IS_GATED && c >= WIDE / 2 ? N / 2 + (c - WIDE / 2) * LANES : c * LANES);
      for (long i = 0; i < count * WIDE; i++) sums[i] = HAS_BIAS ? *(const f32 *)(bias + o[i % WIDE]) : (f32){};
      for (int k = 0, end; k < K; k = end) {
        end = K - k < DEPTH ? K : k + DEPTH;
        for (int i = k; HAS_PANEL && i < end; i++) EACH(c, WIDE)
          panel[(i - k) * WIDE + c] = decode((void *)weight, (void *)scale, (void *)offset, o[c], i);
        long t = 0;
        TILES(HIGH) TILES(4) TILES(2) TILES(1)
      }
      for (long t = 0; t < count; t++) {
        float *values = (float *)(sums + t * WIDE), *to = (float *)out + targets[t] * WIDTH + first % WIDTH;
        for (int i = 0; i < OUTPUTS; i++)
          to[i] = IS_GATED ? ACTIVATED(values[i]) * values[OUTPUTS + i] : values[i] + (ADDS ? to[i] : 0);
      }
    }
  }
}
