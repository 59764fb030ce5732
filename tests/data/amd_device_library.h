#define DEVICE extern "C" __attribute__((device, always_inline))
#define INDEX(name, builtin) DEVICE unsigned long __ockl_get_##name(unsigned axis) { \
  return axis == 0 ? __builtin_amdgcn_##builtin##_x() : axis == 1 ? __builtin_amdgcn_##builtin##_y() \
                                                                 : __builtin_amdgcn_##builtin##_z(); }
#define MATH(name) \
  DEVICE float __ocml_##name##_f32(float x) { return __builtin_elementwise_##name(x); } \
  DEVICE _Float16 __ocml_##name##_f16(_Float16 x) { return __builtin_elementwise_##name(x); }
INDEX(local_id, workitem_id)
INDEX(group_id, workgroup_id)
INDEX(local_size, workgroup_size)
MATH(exp2)
MATH(log2)
MATH(sqrt)
MATH(trunc)
