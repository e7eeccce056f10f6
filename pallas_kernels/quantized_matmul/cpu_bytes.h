/* Products of bytes and squares of 32-bit lanes that are turned, for cpu.c. Knows nothing of matrices. */
#pragma once
#include <string.h>

#include "../lanes.h"
#if LANES > 4
#include <immintrin.h>
#endif

#if LANES == 16
#define TOKENS 4 /* that are multiplied together: sums, parts and dots of theirs fill the registers */
#else
#define TOKENS 2
#endif

typedef int16_t pairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Within every 16 bytes of two registers, taken in turns. */
#define SIXTEEN_BYTES(at, a, b, c, d) (at) + (a), (at) + (b), (at) + (c), (at) + (d)
#if LANES == 16
#define EACH(a, b, c, d) \
  SIXTEEN_BYTES(0, a, b, c, d), SIXTEEN_BYTES(4, a, b, c, d), SIXTEEN_BYTES(8, a, b, c, d), SIXTEEN_BYTES(12, a, b, c, d)
#elif LANES == 8
#define EACH(a, b, c, d) SIXTEEN_BYTES(0, a, b, c, d), SIXTEEN_BYTES(4, a, b, c, d)
#else
#define EACH(a, b, c, d) a, b, c, d
#endif
#define FIRST_TWO EACH(0, LANES, 1, LANES + 1)
#define LAST_TWO EACH(2, LANES + 2, 3, LANES + 3)
#define FIRST_PAIR EACH(0, 1, LANES, LANES + 1)
#define LAST_PAIR EACH(2, 3, LANES + 2, LANES + 3)

typedef int32_t fours __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t bytes __attribute__((vector_size(32), aligned(1), may_alias));

/* As the inputs of bytes with two codes lie once these are taken apart: the low ones of four bytes, then the high ones. */
INLINE bytes by_nibble(bytes b) {
#define EIGHT(i) i, i + 2, i + 4, i + 6, i + 1, i + 3, i + 5, i + 7
#ifdef __clang__
  return __builtin_shufflevector(b, b, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24));
#else
  return __builtin_shuffle(b, (bytes){EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)});
#endif
}

INLINE ivec larger_of(ivec a, ivec b) {
#if LANES == 16
  return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return (ivec)choose(a > b, (vec)a, (vec)b);
#endif
}

INLINE int32_t largest_lane(ivec v) {
#if LANES == 16
  return _mm512_reduce_max_epi32((__m512i)v);
#else
#pragma GCC unroll 3
  for (int n = LANES; n > 1; n /= 2) v = larger_of(SHUFFLE(v, v, EVEN), SHUFFLE(v, v, ODD));
  return v[0];
#endif
}

INLINE int32_t lane_sum(ivec v) {
#if LANES == 16
  return _mm512_reduce_add_epi32((__m512i)v);
#else
#pragma GCC unroll 3
  for (int n = LANES; n > 1; n /= 2) v = SHUFFLE(v, v, EVEN) + SHUFFLE(v, v, ODD);
  return v[0];
#endif
}

/* In every lane the sum, and the products of its four bytes: `codes` has no sign, `four` has. */
INLINE ivec with_dots(ivec sum, ivec codes, ivec four) {
#if LANES == 16 && defined(__AVX512VNNI__)
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)four);
#elif LANES == 8 && defined(__AVXVNNI__)
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)four);
#else
  /* 255 * 128 fits 16 bits. */
  const pairs even = (pairs)(codes & 0x00FF00FF), odd = (pairs)((codes >> 8) & 0x00FF00FF);
  const pairs four_even = (pairs)(four << 8) >> 8, four_odd = (pairs)four >> 8;
#if LANES == 8 && defined(__AVX2__)
  return sum + (ivec)_mm256_madd_epi16((__m256i)even, (__m256i)four_even) +
         (ivec)_mm256_madd_epi16((__m256i)odd, (__m256i)four_odd);
#else
  const ivec products = (ivec)(even * four_even), others = (ivec)(odd * four_odd);
  return sum + (products << 16 >> 16) + (products >> 16) + (others << 16 >> 16) + (others >> 16);
#endif
#endif
}

/* Of LANES rows, `row_bytes` apart and not beyond `last`, the 16 bytes from `column` on, turned: out[i] has row l's ith
   four bytes in lane l. */
INLINE void turn(const uint8_t *rows, int64_t row_bytes, int64_t last, int64_t column, ivec out[4]) {
  ivec part[4]; /* rows i, i + 4, i + 8 ... */
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#define FOUR_OF(n) (*(const fours *)(rows + least_of(i + 4 * (n), last) * row_bytes + column))
#if LANES == 16
    part[i] = (ivec)_mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512((__m128i)FOUR_OF(0)), (__m128i)FOUR_OF(1), 1),
                           (__m128i)FOUR_OF(2), 2),
        (__m128i)FOUR_OF(3), 3);
#elif LANES == 8
    part[i] = (ivec)_mm256_insertf128_si256(_mm256_castsi128_si256((__m128i)FOUR_OF(0)), (__m128i)FOUR_OF(1), 1);
#else
    part[i] = FOUR_OF(0);
#endif
  }
  const ivec a = SHUFFLE(part[0], part[1], FIRST_TWO), b = SHUFFLE(part[2], part[3], FIRST_TWO);
  const ivec c = SHUFFLE(part[0], part[1], LAST_TWO), d = SHUFFLE(part[2], part[3], LAST_TWO);
  out[0] = SHUFFLE(a, b, FIRST_PAIR);
  out[1] = SHUFFLE(a, b, LAST_PAIR);
  out[2] = SHUFFLE(c, d, FIRST_PAIR);
  out[3] = SHUFFLE(c, d, LAST_PAIR);
}

INLINE float number(const void *numbers, int64_t i, int is_bfloat16) {
  if (!is_bfloat16) return ((const float *)numbers)[i];
  const uint32_t bits = (uint32_t)((const uint16_t *)numbers)[i] << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
