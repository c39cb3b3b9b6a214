// Products of bfloat16 rows and panels by AMX or AVX512-BF16. Elsewhere rows are float32, and weights
// in bfloat16 are widened (step_kernels.cpp). Included by step_kernels.cpp only.

#pragma once

#ifdef __AVX512BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

bool amx_allowed = false, multiplies_halves = false; // on this processor

#ifndef __AVX512BF16__

using Narrow = float; // the rows of a product with bfloat16
bool allow_amx() { return false; }

#else

using Narrow = half;

template <> inline vec add_product<pair>(vec value, vec weights, vec sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)value, (__m512bh)weights);
}

// AMX: sums in tiles 0 to 3 (2 x 16 rows, 2 x 16 outputs), rows in 4 and 5, the panel in 6 and 7.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void set_tiles(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = rows[tile] ? 64 : 0;
    config.rows[tile] = uint8_t(rows[tile]);
  }
  asm volatile("" : : "r"(&config) : "memory"); // GCC believes that 8 bytes of it are read
  _tile_loadconfig(&config);
}

bool allow_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

void multiply(const half *rows, long stride, int count, const half *panel, long depth, float *to,
              long to_stride, bool add, long ahead, const void *next) {
  if (!amx_allowed)
    return multiply(reinterpret_cast<const float *>(rows), stride / 2, count,
                    reinterpret_cast<const pair *>(panel), PANEL, depth / 2, to, to_stride, add,
                    static_cast<const pair *>(next));
  for (int r = 0; r < count; r += 32) {
    const int first = std::min(16, count - r), second = std::max(0, std::min(16, count - r - 16));
    set_tiles(first, second);
    const half *above = rows + r * stride, *below = above + 16 * stride;
    float *out = to + r * to_stride, *out_below = out + 16 * to_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
      _tile_zero(2);
      _tile_zero(3);
    }
    if (add) {
      _tile_loadd(0, out, 4 * to_stride);
      _tile_loadd(1, out + 16, 4 * to_stride);
      if (second) {
        _tile_loadd(2, out_below, 4 * to_stride);
        _tile_loadd(3, out_below + 16, 4 * to_stride);
      }
    }
    for (long k = 0; k < depth; k += 32) {
      const half *weights = panel + k * PANEL;
      if (r == 0)
        fetch(weights + 2048, ahead);
      _tile_loadd(6, weights, 4 * PANEL);
      _tile_loadd(7, weights + 32, 4 * PANEL);
      _tile_loadd(4, above + k, 2 * stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second) {
        _tile_loadd(5, below + k, 2 * stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, 4 * to_stride);
    _tile_stored(1, out + 16, 4 * to_stride);
    if (second) {
      _tile_stored(2, out_below, 4 * to_stride);
      _tile_stored(3, out_below + 16, 4 * to_stride);
    }
  }
}

// A panel of few bits in bfloat16: [inputs / 2, PANEL, 2]. Weights of 8 bits stay without their
// scales, so they are exact; those of 4 bits are rounded.
void unpack(const uint8_t *panel, bool is_int4, long inputs, half *to) {
  using namespace quantized;
  auto store_pairs = [&](vec even, vec odd) {
    const words low = (words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const words high = (words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    store(reinterpret_cast<float *>(to), (vec)(low | high << 16));
    to += 2 * LANES;
  };
  const uint8_t *at = is_int4 ? panel : panel + SCALE_BYTES;
  if (!is_int4) {
    for (long k = 0; k < inputs; k += 2, at += 2 * PANEL)
      for (int i = 0; i < PANEL; i += LANES)
        store_pairs(from_int8(at + i), from_int8(at + PANEL + i));
    return;
  }
  for (long g = 0; g < inputs / GROUP; ++g, at += INT4_GROUP_BYTES) {
    vec scales[PARTS], minima[PARTS];
    for (int i = 0; i < PARTS; ++i) {
      scales[i] = load(scales_of(at) + LANES * i);
      minima[i] = load(scales_of(at) + PANEL + LANES * i);
    }
    for (int eight = 0; eight < 4; ++eight) {
      words fours[PARTS];
      for (int i = 0; i < PARTS; ++i)
        fours[i] = load_words(at + 4 * (eight * PANEL + i * LANES));
      for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < PARTS; ++i) {
          store_pairs(multiply_add(low_four_bits((vec_int)fours[i]), scales[i], minima[i]),
                      multiply_add(low_four_bits((vec_int)(fours[i] >> 4)), scales[i], minima[i]));
          fours[i] >>= 8;
        }
    }
  }
}

#endif

} // namespace
