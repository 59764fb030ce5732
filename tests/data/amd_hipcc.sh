#!/bin/sh
case "$*" in
  *.cpp*) exec clang-19 -x hip -nogpuinc -nogpulib -Wno-ignored-attributes \
    -include "$(dirname "$0")/device_library.h" -Xclang -target-feature -Xclang @UNALIGNED@ "$@";;
  *) exec clang-19 -nogpulib "$@";;
esac
