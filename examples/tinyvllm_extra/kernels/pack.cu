// Copies x, (T, K), to the order that wgmma.cu reads, (tiles, K / INPUTS, ROWS, 128 bytes): a block for each row. If it
// becomes e4m3, the row's largest number becomes 448, and the scales of all rows, for W's small floats decoded as in
// NumberFormat, are stored after it.
#define INPUTS (64 << IS_E4M3)   // of a row of 128 bytes
DEVICE u32 pack_e4m3(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
extern "C" __global__ void __launch_bounds__(256) NAME(ARGUMENTS) {
  float* const of_warp = (float*)memory;   // its largest number
  const int t = blockIdx.x;
  if (t >= ROWS_OF_STEP) return;
  const u32* from = (const u32*)x + (size_t)t * (K / 2);
  float largest = 1e-20f, factor = 1;
  if (IS_E4M3) {
    for (int i = threadIdx.x; i < K; i += 256) largest = fmaxf(largest, fabsf(number(from[i / 2], i % 2)));
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    UNROLL for (int i = 0; i < 8; i++) largest = fmaxf(largest, of_warp[i]);
    if (threadIdx.x == 0) ((float*)(out + (size_t)T * K))[t] = largest / (448 * 256);
    factor = 448 / largest;
  }
  for (int chunk = threadIdx.x; chunk < K * 8 / INPUTS; chunk += 256) {   // of 16 bytes
    u32 y[4];
    UNROLL for (int c = 0; c < 4; c++) {
      const u32* own = from + (IS_E4M3 ? chunk / 2 * 16 + chunk % 2 * 2 + c * 4 : chunk / 4 * 16 + chunk % 4 + c * 4);
      auto half = [&](u32 pair) { return pack_e4m3(number(pair, 0) * factor, number(pair, 1) * factor); };
      y[c] = IS_E4M3 ? half(own[0]) | half(own[1]) << 16 : own[0];
    }
    const size_t row = ((size_t)(t / ROWS) * (K / INPUTS) + chunk / 8) * ROWS + t % ROWS;
    ((uint4*)out)[row * 8 + (chunk % 8 ^ t % 8)] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}
