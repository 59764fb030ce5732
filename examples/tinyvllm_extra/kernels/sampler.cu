// Sampler.keep_top: out = x, (S, V) float32 in 0..1, or 0 below the largest threshold with which the kept weights reach
// goals, (S,). A weight is the number itself or, with COUNTS, 1.
//
// On a GPU, PARTS work groups, on Hopper a cluster, keep a row in registers, COUNT numbers per thread. On a CPU, a core
// has each PARTS-th row, keeps it in `out`, and clang vectorizes the loops.
#define BITS(x) __builtin_bit_cast(int, x)   // of positive floats, which sort like them
#if IS_C
#pragma clang fp reassociate(on)   // lanes of a vector add up
#define SIGNATURE void NAME(ARGUMENTS, int core_id)
#define EACH(i) for (int i = 0; i < V; i++)
#define OWN(i) to[i]
#define ADD_UP(sums)
#else
#define SIGNATURE extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER NAME(ARGUMENTS)
#define EACH(i) UNROLL for (int c = 0, i = blockIdx.x * THREADS + threadIdx.x; c < COUNT; c++, i += ALL) if (i < V)
#define OWN(i) own[c]
#define ADD_UP(sums) add_up(sums, (float*)memory, bit / 2 % 2)
DEVICE void sync() {
  if (PARTS == 1) __syncthreads();
  else PTX("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::);
}
// Adds up the numbers of all threads of a row. slot: alternates, as others may still read the last results
DEVICE void add_up(float (&x)[3], float* of_warps, int slot) {
  float* const results = of_warps + (THREADS / 32 + slot * PARTS) * 3;
  UNROLL for (int j = 0; j < 3; j++) {
    UNROLL for (int lanes = 1; lanes < 32; lanes *= 2) x[j] += __shfl_xor_sync(~0u, x[j], lanes);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32 * 3 + j] = x[j];
    x[j] = 0;
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    float y = 0;
    UNROLL for (int warp = 0; warp < THREADS / 32; warp++) y += of_warps[warp * 3 + threadIdx.x];
    results[blockIdx.x * 3 + threadIdx.x] = y;
    UNROLL for (int group = 0; group < PARTS && PARTS > 1; group++)   // stores y in the shared memory of each
      PTX("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2;}"
          :: "r"(address(results + blockIdx.x * 3 + threadIdx.x)), "r"(group), "f"(y));
  }
  sync();
  UNROLL for (int i = 0; i < 3 * PARTS; i++) x[i % 3] += results[i];
}
#endif

SIGNATURE {
#if !IS_C
  float own[COUNT];
  sync();   // all work groups of the cluster have started
#endif
  for (int row = ROW; row < S; row += IS_C ? PARTS : S) {
    const float* const from = (const float*)x + (long)row * V;
    float *const to = (float*)out + (long)row * V, target = goals[row];
    EACH(i) OWN(i) = from[i];
    int threshold = 0;   // two bits in each round; infinity is out of reach
    for (int bit = 28; bit >= 0 && target < 1e30f; bit -= 2) {
      float sums[3] = {};
      EACH(i) for (int j = 0; j < 3; j++)
        sums[j] += BITS(OWN(i)) >= threshold + ((j + 1) << bit) ? COUNTS ? 1 : OWN(i) : 0;
      ADD_UP(sums);
      threshold += ((sums[0] >= target) + (sums[1] >= target) + (sums[2] >= target)) << bit;
    }
    EACH(i) to[i] = BITS(OWN(i)) >= threshold ? OWN(i) : 0;
  }
}
