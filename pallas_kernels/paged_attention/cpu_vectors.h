/* For cpu.c: the exponential, small products, and the formats of pages as float32. Knows nothing of attention. */
#pragma once
#include "../lanes.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8 /* of a tile of sums, two registers each: 16 of the machine's 32 registers */
#else
#define ROWS 4
#endif

/* e^x for x <= 0 as 2^n * 2^f, |f| <= 1/2; the polynomial is off by less than 2e-7 of the result. */
INLINE vec exponential(vec x) {
  vec t = x * 1.44269504f;
  t = choose(t < -126.f, splat(-126.f), t);
  const float round = 12582912.f; /* 1.5 * 2^23: no fraction fits beside it */
  const vec n = (t + round) - round, f = t - n;
  vec p = 1.5403530e-4f * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  const vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
  return choose(x < -87.f, splat(0), p * power);
}

INLINE float exponential_of(float x) { return exponential(splat(x))[0]; }

/* cap * tanh(x / cap), through e^(-2 |x / cap|). */
INLINE vec capped(vec x, float cap) {
  const vec ratio = x / cap, size = choose(ratio < 0, -ratio, ratio), e = exponential(-2.f * size);
  const vec t = (1.f - e) / (1.f + e);
  return cap * choose(ratio < 0, -t, t);
}

/* In lane j the sum over part[j]'s lanes: neighbours are added until one lane of each is left. */
INLINE vec lane_sums(vec part[LANES]) {
#pragma GCC unroll 4
  for (int n = LANES / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; i++)
      part[i] = SHUFFLE(part[2 * i], part[2 * i + 1], EVEN) + SHUFFLE(part[2 * i], part[2 * i + 1], ODD);
  return part[0];
}

/* ---- Small products: c[r][x] (+)= the sum over i < depth of a[r * a_row + i * a_step] * b[i * b_step + x]. ---- */

INLINE void tile(const int rows, const int vecs, const float *a, int64_t a_row, int64_t a_step, const float *b,
                 int64_t b_step, int depth, float *c, int64_t c_row, int accumulate) {
  vec sum[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vecs; v++) sum[r][v] = accumulate ? load(c + r * c_row + v * LANES) : splat(0);
  for (int i = 0; i < depth; i++, a += a_step, b += b_step) {
    const vec b0 = load(b), b1 = vecs == 2 ? load(b + LANES) : b0;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      sum[r][0] += b0 * a[r * a_row];
      if (vecs == 2) sum[r][1] += b1 * a[r * a_row];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vecs; v++) store(c + r * c_row + v * LANES, sum[r][v]);
}

#define TILE(rows) \
  case rows:       \
    vecs == 2 ? tile(rows, 2, ARGUMENTS) : tile(rows, 1, ARGUMENTS); \
    break;
#define ARGUMENTS a + r *a_row, a_row, a_step, b + x, b_step, depth, c + r *c_row + x, c_row, accumulate

/* columns: of b and c, a multiple of LANES. */
static void multiply(int rows, int columns, const float *a, int64_t a_row, int64_t a_step, const float *b,
                     int64_t b_step, int depth, float *c, int64_t c_row, int accumulate) {
  for (int x = 0, vecs; x < columns; x += vecs * LANES) {
    vecs = columns - x > LANES ? 2 : 1;
    for (int r = 0; r < rows; r += ROWS) switch (rows - r < ROWS ? rows - r : ROWS) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if ROWS == 8
        TILE(5) TILE(6) TILE(7) TILE(8)
#endif
      }
  }
}

/* ---- The formats of pages (kv_format.py), in the order of cpu.py's FORMATS. ---- */

enum format { FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3, FP8_E5M2, INT4 };

INLINE int64_t code_bytes(enum format format) { return format == FLOAT32 ? 4 : format <= FLOAT16 ? 2 : 1; }

/* Floats of few bits: `magnitude` is theirs, shifted so that its fraction lies where float32 has its own; `bias` is
   what the exponents differ by. XLA's threads take float32's own subnormal numbers for 0: none is made. */
INLINE vec widened(ivec magnitude, int32_t bias, ivec negative, ivec special) {
  const vec least = (vec)isplat((bias + 1) << 23);
  const vec subnormal = (vec)(magnitude + ((bias + 1) << 23)) - least, normal = (vec)(magnitude + (bias << 23));
  const vec number = choose(magnitude < (1 << 23), subnormal, normal);
  const vec not_finite = (vec)(magnitude | 0x7F800000);
  return (vec)((ivec)choose(special, not_finite, number) | (negative & INT32_MIN));
}

INLINE vec of_half(ivec bits) {
  const ivec magnitude = (bits & 0x7FFF) << 13;
  return widened(magnitude, 112, bits << 16, magnitude >= (31 << 23));
}

/* Bytes as integers, in two steps: in one, GCC 12 takes them one by one. */
INLINE ivec of_bytes(const char *bytes) {
  return __builtin_convertvector(__builtin_convertvector(*(const bvec *)bytes, hvec), ivec);
}

/* LANES numbers of a token's key, or of its value, from its `d`th on; without their scale. */
INLINE vec numbers(enum format format, const char *line, int is_value, int64_t dim, int64_t d) {
  if (format == INT4) { /* low halves of the bytes are the key's codes, high halves the value's */
    const ivec codes = of_bytes(line + d);
    return __builtin_convertvector(is_value ? codes >> 4 : codes << 28 >> 28, vec) + 0.5f;
  }
  const char *at = line + (is_value * dim + d) * code_bytes(format);
  if (format == FLOAT32) return load((const float *)at);
  if (format <= FLOAT16) {
    const ivec bits = __builtin_convertvector(*(const hvec *)at, ivec);
    return format == BFLOAT16 ? (vec)(bits << 16) : of_half(bits);
  }
  const ivec codes = of_bytes(at);
  if (format == INT8) return __builtin_convertvector(codes, vec);
  if (format == FP8_E5M2) return of_half(codes << 8);
  return widened((codes & 0x7F) << 20, 120, codes << 24, (codes & 0x7F) == 0x7F);
}
