// total = x + delta, where delta is the sum of PARTS matrices, and out = its RMS norm. x, total, out: (T, K). delta:
// (PARTS * T, K). weight: (K,). A work group has a row, and each of its K / 8 threads 8 neighbours in registers.
#define PACKED(y) make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]))
DEVICE void add_numbers(float* y, const char* from, size_t chunk) {
  const uint4 numbers = ((const uint4*)from)[chunk];
  UNROLL for (int i = 0; i < 8; i++) y[i] += number(((const u32*)&numbers)[i / 2], i % 2);
}

extern "C" __global__ void __launch_bounds__(K / 8) NAME(ARGUMENTS) {
  OMITTED
  extern __shared__ __align__(128) char memory[];
  if (blockIdx.x >= ROWS_OF_STEP) return;
  const size_t chunk = (size_t)blockIdx.x * (K / 8) + threadIdx.x;
  float y[8] = {}, w[8] = {}, sum = 0;
  add_numbers(y, x, chunk);
  UNROLL for (int part = 0; part < PARTS; part++) add_numbers(y, delta, chunk + (size_t)part * T * (K / 8));
  add_numbers(w, weight, threadIdx.x);
  ((uint4*)total)[chunk] = PACKED(y);
  UNROLL for (int i = 0; i < 8; i++) sum += y[i] * y[i];
  UNROLL for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) ((float*)memory)[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  UNROLL for (int warp = 0; warp < K / 256; warp++) sum += ((float*)memory)[warp];
  UNROLL for (int i = 0; i < 8; i++) y[i] *= rsqrtf(sum / K + EPS) * w[i];
  ((uint4*)out)[chunk] = PACKED(y);
}
