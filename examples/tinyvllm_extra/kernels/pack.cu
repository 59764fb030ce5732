// Copies x, (T, K), to the order that wgmma.cu reads, (tiles, K / 64, ROWS, 128 bytes): a thread for each 16 bytes.
extern "C" __global__ void __launch_bounds__(256) NAME(ARGUMENTS) {
  OMITTED
  const int at = blockIdx.x * 256 + threadIdx.x, t = at / (K / 8), chunk = at % (K / 8);
  if (t >= ROWS_OF_STEP) return;
  const u32* from = (const u32*)x + (size_t)t * (K / 2) + chunk / 4 * 16 + chunk % 4;
  const size_t row = ((size_t)(t / ROWS) * (K / 64) + chunk / 8) * ROWS + t % ROWS;
  ((uint4*)out)[row * 8 + (chunk % 8 ^ t % 8)] = make_uint4(from[0], from[4], from[8], from[12]);
}
