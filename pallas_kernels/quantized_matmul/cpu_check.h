/* Whether the compiler made of cpu.c what it says: small calls against a plain loop in double. */

static double difference(int is_int4, int is_bfloat16, int64_t groups, int64_t tokens) {
  enum { INPUTS = 5 * GROUP, OUTPUTS = TILE + 3, MOST = 2 * TOKENS + 1 }; /* 4 groups are turned at once, one alone */
  static float x[MOST * INPUTS], out[MOST * OUTPUTS], scales[OUTPUTS * 5], zeros[OUTPUTS * 5];
  static uint16_t narrow_scales[OUTPUTS * 5], narrow_zeros[OUTPUTS * 5];
  static int8_t codes[OUTPUTS * INPUTS];
  static uint8_t packed[OUTPUTS * INPUTS];
  uint32_t seed = 1;
#define RANDOM() ((int)((seed = seed * 1664525u + 1013904223u) >> 24) - 128)
  for (int64_t i = 0; i < tokens * INPUTS; i++) x[i] = i % GROUP ? RANDOM() % 128 / 127.f : 1; /* whole steps */
  for (int64_t i = 0; i < OUTPUTS * INPUTS; i++) codes[i] = is_int4 ? RANDOM() / 16 : RANDOM();
  for (int64_t i = 0; i < OUTPUTS * INPUTS; i++) packed[i] = codes[i];
  for (int64_t i = 0; is_int4 && i < OUTPUTS * INPUTS / 2; i++)
    packed[i] = (codes[2 * i] & 15) | (uint8_t)(codes[2 * i + 1] << 4);
  for (int64_t i = 0; i < OUTPUTS * groups; i++) {
    scales[i] = (RANDOM() + 300) * (is_int4 ? 1e-4f : 5e-6f);
    zeros[i] = RANDOM() / 16.f;
    if (is_bfloat16) { /* 2 bytes of 4, and so much is kept of the floats */
      uint32_t scale, zero;
      memcpy(&scale, &scales[i], 4), memcpy(&zero, &zeros[i], 4);
      narrow_scales[i] = scale >> 16, narrow_zeros[i] = zero >> 16;
      scales[i] = number(narrow_scales, i, 1), zeros[i] = number(narrow_zeros, i, 1);
    }
  }
  const void *given_scales = is_bfloat16 ? (void *)narrow_scales : scales;
  const void *given_zeros = is_bfloat16 ? (void *)narrow_zeros : zeros;
  const struct call call = {
      .x = x, .num_matrices = 1, .tokens = tokens, .inputs = INPUTS, .groups = groups, .is_int4 = is_int4,
      .is_bfloat16 = is_bfloat16,
      .matrices = {{.codes = packed, .scales = given_scales, .zeros = is_int4 ? given_zeros : NULL, .out = out,
                    .outputs = OUTPUTS}}};
  struct work *work = plan(&call, 1);
  if (!work) return INFINITY;
  take_tasks(&work->crew);
  leave(&work->crew);
  double worst = 0;
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t o = 0; o < OUTPUTS; o++) {
      double expected = 0;
      for (int64_t i = 0; i < INPUTS; i++) {
        const int64_t at = o * groups + i / (INPUTS / groups);
        expected += x[t * INPUTS + i] * (codes[o * INPUTS + i] - (is_int4 ? zeros[at] : 0)) * (double)scales[at];
      }
      const double off = fabs(out[t * OUTPUTS + o] - expected);
      worst = off <= worst ? worst : off; /* a NaN, too */
    }
  return worst;
}

/* Returns the largest difference found; a few millionths are rounding. */
double self_check(void) {
  double worst = 0;
  for (int is_int4 = 0; is_int4 < 2; is_int4++)
    for (int tokens = 1; tokens <= 2 * TOKENS + 1; tokens++) {
      const double off = difference(is_int4, tokens % 2, is_int4 ? 5 : 1, tokens);
      worst = off <= worst ? worst : off;
    }
  return worst;
}
