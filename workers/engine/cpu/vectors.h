// Vectors of float32 as wide as the registers. Beside bfloat16_products.h, this is the only code that
// knows AVX-512, AVX2 and NEON. Included by step_kernels.cpp only.
//
// LANES: floats of a vector. PANEL: outputs of a panel. ROWS: rows of a block; the sums of a block
// and the weights of one input fill the registers, of which AVX2 has 16 and the others 32.

#pragma once

#include <cstdint>

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace {

using half = uint16_t; // the bits of a bfloat16

#if defined(__AVX512F__)

constexpr int LANES = 16, PANEL = 32, ROWS = 12;
typedef __m512 vec;
typedef __m512i vec_int;

inline vec multiply_add(vec value, vec weight, vec sum) { return _mm512_fmadd_ps(value, weight, sum); }
inline vec_int wide(const half *from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline void narrow(vec_int words, half *to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16(words));
}
inline vec from_int8(const uint8_t *from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
}
inline vec low_four_bits(vec_int words) { // an index of the permutation is the lowest 4 bits
  return _mm512_permutexvar_ps(words,
                               _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
inline void interleave(vec a, vec b, vec *first, vec *second) {
  const vec_int low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *first = _mm512_permutex2var_ps(a, low, b);
  *second = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int LANES = 8, PANEL = 16, ROWS = 6;
typedef __m256 vec;
typedef __m256i vec_int;

inline vec multiply_add(vec value, vec weight, vec sum) { return _mm256_fmadd_ps(value, weight, sum); }
inline vec_int wide(const half *from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline void narrow(vec_int words, half *to) { // within halves of the vector, then the halves
  const vec_int packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(packed));
}
inline vec from_int8(const uint8_t *from) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
}
inline vec low_four_bits(vec_int words) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15)));
}
inline void interleave(vec a, vec b, vec *first, vec *second) {
  const vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  *first = _mm256_permute2f128_ps(low, high, 0x20);
  *second = _mm256_permute2f128_ps(low, high, 0x31);
}

#elif defined(__aarch64__)

constexpr int LANES = 4, PANEL = 16, ROWS = 6;
typedef float32x4_t vec;
typedef int32x4_t vec_int;

inline vec multiply_add(vec value, vec weight, vec sum) { return vfmaq_f32(sum, value, weight); }
inline vec_int wide(const half *from) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(from))); }
inline void narrow(vec_int words, half *to) { vst1_u16(to, vmovn_u32(vreinterpretq_u32_s32(words))); }
inline vec from_int8(const uint8_t *from) {
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  const int16x8_t eight = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight)));
}
inline vec low_four_bits(vec_int words) { return vcvtq_f32_s32(vandq_s32(words, vdupq_n_s32(15))); }
inline void interleave(vec a, vec b, vec *first, vec *second) {
  *first = vzip1q_f32(a, b);
  *second = vzip2q_f32(a, b);
}

#else
#error "our kernels need AVX-512, AVX2 with FMA, or NEON"
#endif

// What follows needs no more than the operators of GCC's and Clang's vectors.

constexpr int PARTS = PANEL / LANES; // vectors that hold a value of each output
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef vec vec_at __attribute__((aligned(1), may_alias)); // at any address
typedef words words_at __attribute__((aligned(1), may_alias));

inline vec all(float value) { return value - vec{}; } // + would lose the sign of -0
inline words all(uint32_t word) { return word + words{}; }
inline words load_words(const void *from) { return *static_cast<const words_at *>(from); }
inline vec load(const float *from) { return *reinterpret_cast<const vec_at *>(from); }
inline vec load(const half *from) { return (vec)((words)wide(from) << 16); }
inline void store(float *to, vec values) { *reinterpret_cast<vec_at *>(to) = values; }
inline void store(half *to, vec values) { // rounds to nearest, ties to even
  const words word = (words)values, rounded = word + (word >> 16 & 1) + 0x7fff;
  narrow((vec_int)((values == values ? rounded : all(0x7fc00000u)) >> 16), to);
}

// A number of all lanes: `join` is applied to the halves of the vector, and again to the result.
template <class Join> float reduce(vec values, Join join) {
#pragma GCC unroll 4
  for (int left = LANES / 2; left; left /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i)
      values[i] = join(values[i], values[i + left]);
  return values[0];
}
inline float sum_of(vec values) {
  return reduce(values, [](float a, float b) { return a + b; });
}

// e^x within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline vec exponential(vec x) {
  constexpr float TERMS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f};
  x = 88.7f < x ? all(88.7f) : x; // a NaN stays
  x = -103.0f > x ? all(-103.0f) : x;
  const vec n = x * 1.44269504f + 12582912.0f - 12582912.0f; // to a whole number, by adding 1.5 x 2^23
  const vec r = multiply_add(-n, all(-2.12194440e-4f), multiply_add(-n, all(0.693359375f), x));
  vec p = all(1.9875691500e-4f);
#pragma GCC unroll 5
  for (float term : TERMS)
    p = multiply_add(p, r, all(term));
  p = multiply_add(p * r, r, r + 1.0f);
  // In two steps, as 2^n alone may be too large or too small. A NaN gives a meaningless n.
  const ints power = __builtin_convertvector(n, ints), part = power >> 1;
  return p * (vec)((part + 127) << 23) * (vec)((power - part + 127) << 23);
}

} // namespace
