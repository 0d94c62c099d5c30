// Elements of NCCL's types, read as long double and written rounded to nearest.
#pragma once
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cstdint>
#include <type_traits>

inline size_t bytes_of(int type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

struct BFloat16 {
  uint16_t bits;
  BFloat16(long double value) {
    float rounded = value;
    uint32_t all;
    memcpy(&all, &rounded, 4);
    bits = (all & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (all + 0x7fff + ((all >> 16) & 1)) >> 16;
  }
  operator long double() const {
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
  }
};

// Calls `use` with a pointer of the type.
template <class Use>
auto with_type(char* data, int type, Use use) {
  switch (type) {
    case ncclInt8: return use((int8_t*)data);
    case ncclUint8: return use((uint8_t*)data);
    case ncclInt32: return use((int32_t*)data);
    case ncclUint32: return use((uint32_t*)data);
    case ncclInt64: return use((int64_t*)data);
    case ncclUint64: return use((uint64_t*)data);
    case ncclFloat16: return use((_Float16*)data);
    case ncclBfloat16: return use((BFloat16*)data);
    case ncclFloat32: return use((float*)data);
    case ncclFloat64: return use((double*)data);
  }
  fprintf(stderr, "[nccl] cannot reduce elements of type %d\n", type);
  abort();
}

inline long double get_element(char* data, int type, size_t i) {
  return with_type(data, type, [i](auto* typed) { return (long double)typed[i]; });
}
inline void put_element(char* data, int type, size_t i, long double value) {
  with_type(data, type, [=](auto* typed) {
    typed[i] = static_cast<std::remove_reference_t<decltype(*typed)>>(value);
    return 0;
  });
}
