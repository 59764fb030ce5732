// The names that tinygrad's MetalRenderer uses, for a C++ compiler
#define kernel extern "C"
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
namespace metal {
template <class T> T exp2(T);
template <class T> T log2(T);
template <class T> T sqrt(T);
template <class T> T trunc(T);
namespace precise { template <class T> T sin(T); }
template <class To, class From> To as_type(From x) { return __builtin_bit_cast(To, x); }
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags);
template <class T> struct simdgroup_8x8 { T *thread_elements(); };
typedef simdgroup_8x8<float> simdgroup_float8x8;
typedef simdgroup_8x8<half> simdgroup_half8x8;
template <class C, class A, class B> void simdgroup_multiply_accumulate(C &, A, B, C);
}
