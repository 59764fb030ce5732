// What the CUDA sources share: statements of PTX (the PTX ISA has their operands), and fragments of W and of sums.
//
// W is stored in the order of a lane's operands: a warp multiplies 16 outputs, with two instructions for 32 inputs.
// Lane 4 r + c has the weights of outputs r and r + 8 for inputs 8 c to 8 c + 7. Its sums: two rows each, from 2 c.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define PTX(...) asm volatile(__VA_ARGS__ : "memory")
#define UNROLL _Pragma("unroll")
extern __shared__ __align__(128) char memory[];   // as many bytes as the launch requests

DEVICE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// d += a @ b, with 16 x 16 numbers a and 16 x 8 numbers b
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Copies bytes, and zeros up to 16, to shared memory. A thread waits for its copies, except the last PENDING groups
DEVICE void copy_async(void* to, const void* from, int bytes = 16, bool is_needed = true) {
  PTX("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2;}"
      :: "r"(address(to)), "l"(from), "r"(bytes), "r"((int)is_needed));
}
DEVICE void commit_copies() { PTX("cp.async.commit_group;" ::); }
template <int PENDING> DEVICE void wait_for_copies() { PTX("cp.async.wait_group %0;" :: "n"(PENDING)); }
// Counts up, with all that the thread wrote before, and reads such a count
DEVICE void count(u32* p) { PTX("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(p)); }
DEVICE u32 read_flag(u32* p) { u32 x; PTX("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p)); return x; }
DEVICE float power_of_2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float float_of(u16 half) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half)); return y; }
DEVICE u32 pack(float low, float high) {
  u32 y;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// One of two numbers
DEVICE float number(u32 x, int i) { x >>= i * 16; return TYPE[0] == 'b' ? __uint_as_float(x << 16) : float_of(x); }
// The transposed 8 x 8 numbers of a warp, two in each lane
DEVICE u32 transposed(u32 x) { asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x)); return x; }
// (x - bias) * scale + offset of two float16
DEVICE u32 scaled(u32 x, u32 bias, u32 scale, u32 offset) {
  asm("sub.f16x2 %0, %0, %1; fma.rn.f16x2 %0, %0, %2, %3;" : "+r"(x) : "r"(bias), "r"(scale), "r"(offset));
  return x;
}

#ifdef BITS
// Loads the lane's weights of 32 inputs, see matrices.pack_numbers. scales, offsets: float16, of its two outputs.
// RAW: without scales, and integers times 2^-24
#define W_BYTES (64 * BITS)   // of 16 outputs and 32 inputs
#define SETS (GROUPS * 32 > K ? GROUPS * 32 / K : 1)   // scales of an output in 32 inputs
template <bool RAW = false> DEVICE void load_weights(u32 (*w)[4], const char* from, u32 scales, u32 offsets) {
  struct __align__(BITS * 2) Words { u32 at[BITS / 2]; };
  const int lane = threadIdx.x % 32;
  UNROLL for (int i = 0; i < 8; i++) {   // pairs
    u32& y = w[i / 4][i % 4];
    if (BITS == 16) { y = ((const u32*)from)[i / 2 * 64 + lane * 2 + i % 2]; continue; }
    u32 q = ((const Words*)from)[lane].at[i * BITS / 16] >> i % (16 / BITS) * BITS;
    if (!IS_FLOAT) q = (q & ((1 << BITS % 16) - 1) * 0x10001) | (RAW ? 0 : 0x64006400);
    else q = BITS == 8 ? (q & 0x7f007f) << 7 | (q & 0x800080) << 8 : (q & 0x70007) << 9 | (q & 0x80008) << 12;
    const int half = i % 2 ? 0x3232 : 0x1010;   // of the output
    const u32 own_scale = __byte_perm(scales, 0, half), own_offset = __byte_perm(offsets, 0, half);
    y = RAW ? q : scaled(q, IS_FLOAT ? 0 : 0x64006400 + ZERO_POINT * 0x10001, own_scale, own_offset);
    if (TYPE[0] == 'b') y = pack(float_of(y), float_of(y >> 16));
  }
}
// Stores the sums of 8 rows, those before `end`, and 16 outputs, plus bias; of a GateUp its activations. IS_AX: of LoRA
template <bool IS_AX = false, class Row>
DEVICE void store(char* out, const float* sums, const float* bias, int n16, Row row, int end) {
  const int lane = threadIdx.x % 32, odd = lane % 2, r = row(lane / 4), width = IS_AX ? ADAPTERS * RANK : N;
  float d[4];
  UNROLL for (int e = 0; e < 4; e++) {
    const int column = IS_GATED ? e / 2 * (N / 2) + n16 * 8 + lane / 4 : n16 * 16 + e / 2 * 8 + lane / 4;
    const int own = row(lane % 4 * 2 + e % 2);
    d[e] = sums[e] + (HAS_BIAS && !IS_AX ? bias[column] : 0);
    if (IS_FLOAT32 && own < end) ((float*)out)[(size_t)own * N + column] = d[e];
  }
  if (IS_FLOAT32) return;
  if (IS_GATED && !IS_AX) {
    const u32 both = transposed(pack(ACTIVATED(d[0]) * d[2], ACTIVATED(d[1]) * d[3]));
    if (r < end) ((u32*)out)[(size_t)r * (N / 4) + n16 * 4 + lane % 4] = both;
    return;
  }
  const u32 low = transposed(pack(d[0], d[1])), high = transposed(pack(d[2], d[3]));
  const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);   // neighbours exchange halves: whole sectors
  const uint2 four = odd ? make_uint2(other, high) : make_uint2(low, other);
  auto sum = [](u32 a, u32 b) { return ADDS ? pack(number(a, 0) + number(b, 0), number(a, 1) + number(b, 1)) : a; };
  uint2* const to = (uint2*)out + ((size_t)r * width + n16 * 16 + lane % 4 / 2 * 4 + odd * 8) / 4;
  if (r < end) *to = make_uint2(sum(four.x, to->x), sum(four.y, to->y));
}
#endif
