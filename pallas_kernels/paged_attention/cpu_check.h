/* Whether the compiler made of cpu.c what it says: small calls against a plain loop in double. */

/* A small call in float32 or int8 against a plain loop in double. Returns the largest difference. */
static double difference(enum format format, int queries, int window, float soft_cap) {
  enum { PAGES = 6, KV_HEADS = 2, GROUP = 3, HEADS = KV_HEADS * GROUP, PAGE = 16, DIM = 24, LENGTH = 75, MOST = 20 };
  static float q[MOST * HEADS * DIM], out[MOST * HEADS * DIM], wide[PAGES * KV_HEADS * PAGE * 2 * DIM];
  static int8_t narrow[PAGES * KV_HEADS * PAGE * 2 * DIM];
  static uint16_t scales[PAGES * KV_HEADS * 2 * PAGE];
  const int32_t block_table[] = {3, 1, 5, 2, 4}, table = 0, start = LENGTH - queries, length = LENGTH;
  const float sinks[HEADS] = {0.5f, -1, 2, 0, 1, -0.25f};
  uint32_t seed = 1;
#define RANDOM() ((int)((seed = seed * 1664525u + 1013904223u) >> 25) - 64)
  for (int i = 0; i < queries * HEADS * DIM; i++) q[i] = RANDOM() / 16.f;
  for (int i = 0; i < PAGES * KV_HEADS * PAGE * 2 * DIM; i++) wide[i] = (narrow[i] = RANDOM()) / 32.f;
  for (int i = 0; i < PAGES * KV_HEADS * 2 * PAGE; i++) scales[i] = 0x3D00; /* 1/32 */
  const struct call call = {
      .q = q, .sinks = sinks, .pages = format == INT8 ? (const char *)narrow : (const char *)wide, .scales = scales,
      .block_tables = block_table, .tables = &table, .starts = &start, .lengths = &length, .out = out, .rows = 1,
      .queries = queries, .heads = HEADS, .kv_heads = KV_HEADS, .dim = DIM, .page_size = PAGE, .table_width = 5,
      .window = window, .format = format, .scale = 0.1f, .soft_cap = soft_cap};
  struct work *work = plan(&call, 1);
  if (!work) return INFINITY;
  take_tasks(&work->crew);
  leave(&work->crew);
  double worst = 0;
  for (int i = 0; i < queries; i++)
    for (int head = 0; head < HEADS; head++) {
      double total = exp(sinks[head]), expected[DIM] = {0};
      for (int at = most_of(0, (int64_t)start + i - window + 1); at <= start + i; at++) {
        const float *key = wide + ((block_table[at / PAGE] * KV_HEADS + head / GROUP) * PAGE + at % PAGE) * 2 * DIM;
        double score = 0;
        for (int d = 0; d < DIM; d++) score += 0.1 * q[(i * HEADS + head) * DIM + d] * key[d];
        const double weight = exp(soft_cap > 0 ? soft_cap * tanh(score / soft_cap) : score);
        total += weight;
        for (int d = 0; d < DIM; d++) expected[d] += weight * key[DIM + d];
      }
      for (int d = 0; d < DIM; d++) {
        const double off = fabs(out[(i * HEADS + head) * DIM + d] - expected[d] / total);
        worst = off <= worst ? worst : off; /* a NaN, too */
      }
    }
  return worst;
}

/* Returns the largest difference found; a few millionths are rounding. */
double self_check(void) {
  double worst = 0;
  for (int queries = 1; queries <= 20; queries += 19)
    for (int narrow = 0; narrow < 2; narrow++)
      for (int limited = 0; limited < 2; limited++) {
        const double off = difference(narrow ? INT8 : FLOAT32, queries, limited ? 20 : INT32_MAX, limited ? 3 : 0);
        worst = off <= worst ? worst : off;
      }
  return worst;
}
