// CUDA's names, and PTX's statements for tensor cores, on a CPU: the threads of a block take turns, see Barrier.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#ifndef IS_E4M3
#define IS_E4M3 0
#endif
#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
struct Index { unsigned x, y, z; };
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float power_of_2(float x) { return exp2f(x); }

static Index blockIdx, gridDim;
static ucontext_t scheduler, threads[1024];
static int current;   // thread
struct ThreadIndex { operator Index() const { return {(unsigned)current, 0, 0}; } };
#define threadIdx ((Index)ThreadIndex())
extern "C" { alignas(128) char memory[1 << 18]; }   // shared

struct Barrier {
  int count, arrived, generation;
  void wait() {
    const int begun = generation;
    if (++arrived == count) { arrived = 0; generation++; }
    while (generation == begun) swapcontext(&threads[current], &scheduler);
  }
};
static Barrier of_block, of_warp[32];
static char exchanged[32][32][32];   // 32 bytes of each lane of each warp
inline void __syncthreads() { of_block.wait(); }
template <class T> struct Lanes { T at[32]; };
template <class T> Lanes<T> exchange(const T& own) {   // returns the values of all lanes of the warp
  const int warp = current / 32;
  Lanes<T> all;
  memcpy(exchanged[warp][current % 32], &own, sizeof(T));
  of_warp[warp].wait();
  for (int i = 0; i < 32; i++) memcpy(&all.at[i], exchanged[warp][i], sizeof(T));
  of_warp[warp].wait();
  return all;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int bit) { return exchange(x).at[current % 32 ^ bit]; }
inline bool __any_sync(unsigned, bool x) {
  for (bool other : exchange(x).at) if (other) return true;
  return false;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(both >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

template <bool> struct Number { typedef _Float16 type; };
template <> struct Number<true> { typedef __bf16 type; };
typedef Number<TYPE[0] == 'b'>::type half;   // TYPE: "f16" or "bf16"
inline float half_of(unsigned pair, int i) { return (float)__builtin_bit_cast(half, (unsigned short)(pair >> 16 * i)); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float float_of(unsigned short x) { return (float)__builtin_bit_cast(_Float16, x); }
inline unsigned pack(float low, float high) {
  return __builtin_bit_cast(unsigned short, (half)low) | (unsigned)__builtin_bit_cast(unsigned short, (half)high) << 16;
}
inline float e4m3_of(unsigned char x) { return 256 * float_of((x & 0x7f) << 7 | (x & 0x80) << 8); }
inline unsigned pack_e4m3(float low, float high) {
  const auto nearest = [](float x) {   // ties to even
    int best = 0;
    for (int q = 1; q < 127; q++) {
      const float distance = fabsf(fabsf(x) - e4m3_of(q)), old = fabsf(fabsf(x) - e4m3_of(best));
      if (distance < old || distance == old && q % 2 == 0) best = q;
    }
    return best | (x < 0) << 7;
  };
  return nearest(low) | nearest(high) << 8;
}
struct Fragments { unsigned a[4], b[2]; };
inline void mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  const auto all = exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 16; k++) {
      const int column = current % 4 * 2 + e % 2;
      const Fragments &x = all.at[current % 32 / 4 * 4 + k % 8 / 2], &y = all.at[column * 4 + k % 8 / 2];
      d[e] += half_of(x.a[e / 2 + k / 8 * 2], k % 2) * half_of(y.b[k / 8], k % 2);
    }
}
inline unsigned transposed(unsigned x) {
  const auto all = exchange(x);
  const int row = current % 32 / 4, column = current % 4 * 2;
  const auto number = [&](int from) { return all.at[from * 4 + row / 2] >> row % 2 * 16 & 0xffff; };
  return number(column) | number(column + 1) << 16;
}
inline unsigned scaled(unsigned x, unsigned bias, unsigned scale, unsigned offset) {   // of float16, whatever TYPE is
  unsigned short y[2];
  for (int i = 0; i < 2; i++) {
    const auto at = [i](unsigned pair) { return float_of(pair >> 16 * i); };
    y[i] = __builtin_bit_cast(unsigned short, (_Float16)((_Float16)(at(x) - at(bias)) * at(scale) + at(offset)));
  }
  return y[0] | (unsigned)y[1] << 16;
}
inline unsigned read_flag(unsigned* p) { return *p; }
inline void count(unsigned* p) { ++*p; }
inline void copy_async(void* to, const void* from, int bytes = 16, bool is_needed = true) {
  if (!is_needed) return;
  memcpy(to, from, bytes);
  memset((char*)to + bytes, 0, 16 - bytes);
}
inline void commit_copies() {}
template <int PENDING> void wait_for_copies() {}

// Of wgmma.cu. A barrier is known by its address, an offset in `memory`. Blocks run one after the other, so that those
// which a block waits for have counted
struct Phase { int count, missing, bytes, number; };
static Phase phases[sizeof(memory) / 8];
inline Phase& advance(unsigned bar, int arrivals, int bytes) {
  Phase& phase = phases[bar / 8];
  phase.missing -= arrivals;
  phase.bytes += bytes;
  if (!phase.missing && !phase.bytes) { phase.missing = phase.count; phase.number++; }
  return phase;
}
inline unsigned address(const void* p) { return (const char*)p - memory; }
inline void init(unsigned bar, int count) { phases[bar / 8] = {count, count, 0, 0}; }
inline void arrive(unsigned bar, int bytes) { advance(bar, 1, bytes); }
inline void arrive_after_copies(unsigned bar) { advance(bar, 1, 0); }
inline void copy(unsigned to, const void* from, int bytes, unsigned bar) {
  memcpy(memory + to, from, bytes);
  advance(bar, 0, -bytes);
}
inline void wait(unsigned bar, int parity) {
  while (phases[bar / 8].number % 2 == parity) swapcontext(&threads[current], &scheduler);
}
inline void __syncwarp() { of_warp[current / 32].wait(); }
inline void __threadfence() {}
inline unsigned atomicInc(unsigned* p, unsigned last) { const unsigned x = *p; *p = x < last ? x + 1 : 0; return x; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T x) { *p = x; }
struct Weights { unsigned at[4]; };
template <bool TRANSPOSED = false, int COUNT>
void wgmma(float (&sums)[COUNT], const unsigned (&w)[4], unsigned long long descriptor, int adds) {
  const auto all = exchange(Weights{{w[0], w[1], w[2], w[3]}});
  const unsigned start = (descriptor & 0x3fff) << 4, chunk = start % 128 / 16;   // chunks of 16 bytes are swizzled
  for (int i = 0; i < COUNT; i++) {
    const int row = i / 4 * 8 + current % 4 * 2 + i % 2;
    if (!adds) sums[i] = 0;
    for (int k = 0; k < 32; k += IS_E4M3 ? 1 : 2) {   // bytes
      unsigned short x;
      const unsigned panel = (descriptor >> 12 & 0x3fff0) * (row / 64), swizzled = row / 8 % 8 ^ k / 2 % 8;
      const unsigned from = TRANSPOSED ? start + panel + k / 2 * 128 + swizzled * 16 + row % 8 * 2
                            : start / 128 * 128 + row * 128 + (chunk + k / 16 ^ row % 8) * 16 + k % 16;
      memcpy(&x, memory + from, 2);
      const unsigned w = all.at[current % 32 / 4 * 4 + k % 16 / 4].at[i % 4 / 2 + k / 16 * 2] >> k % 4 * 8;
      sums[i] += IS_E4M3 ? e4m3_of(w) * e4m3_of(x) : half_of(w, 0) * half_of(x, 0);
    }
  }
}

static void (*kernel)();
static bool is_done[1024];
static void run_thread() { kernel(); is_done[current] = true; swapcontext(&threads[current], &scheduler); }
static void launch(void (*function)(), int num_threads) {
  static char stacks[1024 << 16];
  kernel = function;
  for (unsigned i = 0; i < gridDim.x * gridDim.y * gridDim.z; i++) {
    blockIdx = {i % gridDim.x, i / gridDim.x % gridDim.y, i / gridDim.x / gridDim.y};
    of_block = {num_threads};
    for (Barrier& warp : of_warp) warp = {32};
    memset(memory, 0xff, sizeof(memory));   // NaN
    for (current = 0; current < num_threads; current++) {
      ucontext_t& context = threads[current];
      is_done[current] = false;
      getcontext(&context);
      context.uc_stack.ss_sp = &stacks[current << 16];
      context.uc_stack.ss_size = 1 << 16;
      makecontext(&context, run_thread, 0);
    }
    for (bool is_running = true; is_running;) {
      is_running = false;
      for (current = 0; current < num_threads; current++)
        if (!is_done[current]) { is_running = true; swapcontext(&scheduler, &threads[current]); }
    }
  }
}
