#include <metal_stdlib>
using namespace metal;
kernel void big(device half* data0_8, constant int& n, uint3 gid [[threadgroup_position_in_grid]]) {
  threadgroup __attribute__((aligned(16))) float buf0[8192];
  threadgroup __attribute__((aligned(16))) half buf1[1];
}
