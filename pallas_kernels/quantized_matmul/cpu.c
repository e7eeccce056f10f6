/* Products with narrow weights on the CPU as one XLA custom call; the contract is api.py's.

   The weights stay as they lie in memory, [out, in], a byte a code or two codes a byte. A task is a TILE of outputs and a
   BLOCK of tokens. It turns the tile's codes, so that a register has four inputs (the bytes) of LANES outputs (the
   lanes); four inputs of a token, broadcast, are then an instruction a register (VNNI's vpdpbusd: four products of bytes
   and their sum in 32 bits).

   A token's inputs are rounded to bytes too, each GROUP of them with a scale of its own. The sum over a group is exact;
   groups are added as floats, one after the other. So an answer's bits depend on its token and its output
   alone, on no neighbour, no block and no thread. */
#include <math.h>
#include <string.h>

#include "../custom_call.h"
#include "../lanes.h"
#include "cpu_bytes.h"

#define GROUP 32 /* inputs that share an activation's scale; a group of weights is some of these */
#define QUADS (GROUP / 4)
#define VECS 2 /* registers of outputs in a tile */
#define TILE (VECS * LANES)
#define BLOCK 96 /* tokens of a task: their codes stay in the cache while tiles pass by */
#define ROUNDED_TOGETHER 8 /* tokens of a task of rounding */

#define MOST_MATRICES 4

struct matrix {
  const uint8_t *codes;
  const void *scales, *zeros; /* no zeros: NULL */
  float *out;
  int64_t outputs;
};

/* The same tokens times several matrices of one form: so they are rounded once, and threads meet once. */
struct call {
  const float *x;
  struct matrix matrices[MOST_MATRICES];
  int64_t num_matrices, tokens, inputs, groups;
  int is_int4, is_bfloat16; /* is_bfloat16: scales and zeros, which else are float32 */
};

/* The rounded activations, token by token: a byte for each input, in the order in which codes are turned; the groups'
   scales; what the dots of a group begin with; and for every group of weights the sum of its inputs, as they were
   rounded. */
struct work {
  struct crew crew;
  struct call call;
  int64_t small_groups, rounding_tasks, tiles, tile_bytes;
  int8_t *inputs;
  float *scales, *sums;
  int32_t *firsts;
  char *tile; /* tile_bytes for each worker */
  atomic_llong rounded;
};

/* ---- Activations. ---- */

/* One token: x = scale * code. What is not finite makes its group's scale NaN. */
static void round_token(const struct work *work, int64_t token) {
  const struct call *c = &work->call;
  const float *x = c->x + token * c->inputs, magic = 12582912.f; /* 1.5 * 2^23: no fraction fits beside it */
  int8_t *to = work->inputs + token * c->inputs;
  const int64_t per_group = work->small_groups / c->groups;
  for (int64_t g = 0; g < work->small_groups; g++, x += GROUP, to += GROUP) {
    ivec most = {0}, total = {0}; /* sizes as integers: in these, too, NaN is larger than infinity, and that than all */
    for (int i = 0; i < GROUP; i += LANES) {
      most = larger_of((ivec)load(x + i) & INT32_MAX, most);
    }
    const int32_t bits = largest_lane(most);
    float maximum;
    memcpy(&maximum, &bits, sizeof maximum);
    const int is_number = bits < 0x7F800000, is_zero = maximum < 1e-30f;
    const float inverse = is_number && !is_zero ? 127 / maximum : 0;
    const float scale = !is_number ? NAN : is_zero ? 0 : maximum * (1 / 127.f);
    bytes codes;
    for (int i = 0; i < GROUP; i += LANES) {
      const ivec code = ((ivec)(load(x + i) * inverse + magic) - 0x4B400000) & -is_number; /* NaN: 0, sums must fit */
      total += code;
      *(bvec *)((int8_t *)&codes + i) = __builtin_convertvector(code, bvec);
    }
    const int32_t sum = lane_sum(total);
    *(bytes *)to = c->is_int4 ? by_nibble(codes) : codes;
    const int64_t at = token * work->small_groups + g;
    work->scales[at] = scale;
    work->firsts[at] = -sum * (c->is_int4 ? 8 : 128);
    float *sums = work->sums + token * c->groups + g / per_group;
    *sums = (g % per_group ? *sums : 0) + scale * sum;
  }
}

/* ---- A tile of outputs. ---- */

/* Numbers of TILE rows from `first` on, into [columns][TILE]; of rows beyond the last one, the last one's. */
static void turn_numbers(const struct call *c, const void *numbers, int64_t outputs, int64_t first, float *to) {
  const int64_t columns = c->groups, last = outputs - 1;
  const int64_t whole = c->is_bfloat16 ? 0 : columns / 4 * 4;
  for (int64_t g = 0; g < whole; g += 4)
    for (int v = 0; v < VECS; v++) {
      ivec turned[4];
      const int64_t row = least_of(first + v * LANES, last);
      turn((const uint8_t *)numbers + row * columns * 4, columns * 4, last - row, g * 4, turned);
      for (int i = 0; i < 4; i++) store(to + (g + i) * TILE + v * LANES, (vec)turned[i]);
    }
  for (int64_t g = whole; g < columns; g++)
    for (int64_t r = 0; r < TILE; r++)
      to[g * TILE + r] = number(numbers, least_of(first + r, last) * columns + g, c->is_bfloat16);
}

/* Calls the `part`th of `parts` of a tile's rows from memory. */
INLINE void prefetch_share(const void *rows, int64_t row_bytes, int64_t first, int64_t end, int64_t part,
                           int64_t parts) {
  const int64_t bytes = least_of(TILE, end - first) * row_bytes, share = rounded_up(bytes / parts + 1, 64);
  const char *from = (const char *)rows + first * row_bytes;
  for (int64_t at = part * share; at < least_of(bytes, (part + 1) * share); at += 64) __builtin_prefetch(from + at);
}

/* A tile's codes, turned and without a sign, then its scales, and its zero points: [groups][TILE] each. */
static void turn_tile(const struct call *c, const struct matrix *m, int64_t first, char *tile) {
  const int64_t row_bytes = c->is_int4 ? c->inputs / 2 : c->inputs, last = m->outputs - 1;
  const int64_t number_bytes = c->groups * (c->is_bfloat16 ? 2 : 4), columns = row_bytes / 16;
  ivec *to = (ivec *)tile;
  for (int64_t column = 0; column < columns; column++) {
    /* The next tile is probably ours, too. */
    prefetch_share(m->codes, row_bytes, first + TILE, m->outputs, column, columns);
    prefetch_share(m->scales, number_bytes, first + TILE, m->outputs, column, columns);
    if (m->zeros) prefetch_share(m->zeros, number_bytes, first + TILE, m->outputs, column, columns);
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
      ivec turned[4];
      const int64_t row = least_of(first + v * LANES, last);
      turn(m->codes + row * row_bytes, row_bytes, last - row, column * 16, turned);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        if (c->is_int4) {
          to[2 * i * VECS + v] = (turned[i] ^ 0x08080808) & 0x0F0F0F0F;
          to[(2 * i + 1) * VECS + v] = ((turned[i] ^ (int32_t)0x80808080) >> 4) & 0x0F0F0F0F;
        } else {
          to[i * VECS + v] = turned[i] ^ (int32_t)0x80808080;
        }
      }
    }
    to += (c->is_int4 ? 8 : 4) * VECS;
  }
  turn_numbers(c, m->scales, m->outputs, first, (float *)to);
  if (m->zeros) turn_numbers(c, m->zeros, m->outputs, first, (float *)to + c->groups * TILE);
}

/* `count` tokens from `token` on with a turned tile. */
INLINE void multiply(const struct work *work, const struct matrix *m, const int count, int64_t token, int64_t first,
                     const char *tile) {
  const struct call *c = &work->call;
  const int64_t small_groups = work->small_groups, per_group = small_groups / c->groups;
  const float *tile_scales = (const float *)(tile + c->inputs * TILE), *zeros = tile_scales + c->groups * TILE;
  const int8_t *inputs = work->inputs + token * c->inputs;
  const float *scales = work->scales + token * small_groups, *sums = work->sums + token * c->groups;
  const int32_t *firsts = work->firsts + token * small_groups;
  vec total[TOKENS][VECS] = {0};
  for (int64_t group = 0, g = 0; group < c->groups; group++) {
    vec part[TOKENS][VECS] = {0};
    for (const int64_t end = g + per_group; g < end; g++) {
      ivec dot[TOKENS][VECS];
      const ivec *codes = (const ivec *)tile + g * QUADS * VECS;
#pragma GCC unroll 8
      for (int t = 0; t < count; t++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) dot[t][v] = isplat(firsts[t * small_groups + g]);
#pragma GCC unroll 8
      for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 8
        for (int t = 0; t < count; t++) {
          int32_t four;
          memcpy(&four, inputs + t * c->inputs + g * GROUP + q * 4, 4);
#pragma GCC unroll 2
          for (int v = 0; v < VECS; v++) dot[t][v] = with_dots(dot[t][v], codes[q * VECS + v], isplat(four));
        }
#pragma GCC unroll 8
      for (int t = 0; t < count; t++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++)
          part[t][v] += __builtin_convertvector(dot[t][v], vec) * scales[t * small_groups + g];
    }
#pragma GCC unroll 8
    for (int t = 0; t < count; t++)
#pragma GCC unroll 2
      for (int v = 0; v < VECS; v++) {
        if (m->zeros) part[t][v] -= load(zeros + group * TILE + v * LANES) * sums[t * c->groups + group];
        total[t][v] += part[t][v] * load(tile_scales + group * TILE + v * LANES);
      }
  }
#pragma GCC unroll 8
  for (int t = 0; t < count; t++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
      const int64_t left = m->outputs - first - v * LANES;
      float *to = m->out + (token + t) * m->outputs + first + v * LANES;
      if (left >= LANES) store(to, total[t][v]);
      else if (left > 0) memcpy(to, &total[t][v], left * sizeof(float));
    }
}

static void run_task(struct crew *crew, int64_t task, int worker) {
  struct work *work = (struct work *)crew;
  const struct call *c = &work->call;
  if (task < work->rounding_tasks) {
    const int64_t first = task * ROUNDED_TOGETHER, end = least_of(c->tokens, first + ROUNDED_TOGETHER);
    for (int64_t token = first; token < end; token++) round_token(work, token);
    atomic_fetch_add(&work->rounded, 1);
    return;
  }
  task -= work->rounding_tasks;
  char *tile = work->tile + worker * work->tile_bytes;
  const int64_t block = task / work->tiles * BLOCK;
  const struct matrix *m = c->matrices;
  int64_t first = task % work->tiles * TILE;
  for (; first >= rounded_up(m->outputs, TILE); m++) first -= rounded_up(m->outputs, TILE);
  turn_tile(c, m, first, tile);
  /* Whoever has the tasks of rounding that are not done is at work on them. */
  while (atomic_load(&work->rounded) < work->rounding_tasks) sched_yield();
  const int64_t end = least_of(c->tokens, block + BLOCK);
  int64_t token = block;
  for (; token + TOKENS <= end; token += TOKENS) multiply(work, m, TOKENS, token, first, tile);
  switch (end - token) {
#if TOKENS > 2
    case 3: multiply(work, m, 3, token, first, tile); break;
    case 2: multiply(work, m, 2, token, first, tile); break;
#endif
    case 1: multiply(work, m, 1, token, first, tile); break;
  }
}

/* With memory for up to `workers` threads, in one allocation. Returns NULL where there is no memory. */
static struct work *plan(const struct call *c, int64_t workers) {
  const int64_t small_groups = c->inputs / GROUP;
  int64_t tiles = 0;
  for (int i = 0; i < c->num_matrices; i++) tiles += (c->matrices[i].outputs + TILE - 1) / TILE;
  const int64_t tile_bytes = rounded_up(c->inputs * TILE + 2 * c->groups * TILE * sizeof(float), 64);
  const int64_t input_bytes = rounded_up(c->tokens * c->inputs, 64);
  const int64_t head_bytes = rounded_up(sizeof(struct work), 64);
  const int64_t numbers = c->tokens * (2 * small_groups + c->groups);
  char *memory = aligned_alloc(64, rounded_up(head_bytes + workers * tile_bytes + input_bytes + numbers * 4, 64));
  if (!memory) return NULL;
  struct work *work = (struct work *)memory;
  work->call = *c;
  work->small_groups = small_groups;
  work->rounding_tasks = (c->tokens + ROUNDED_TOGETHER - 1) / ROUNDED_TOGETHER;
  work->tiles = tiles;
  work->tile_bytes = tile_bytes;
  work->tile = memory + head_bytes;
  work->inputs = (int8_t *)(work->tile + workers * tile_bytes);
  work->scales = (float *)(work->inputs + input_bytes);
  work->firsts = (int32_t *)(work->scales + c->tokens * small_groups);
  work->sums = (float *)(work->firsts + c->tokens * small_groups);
  atomic_init(&work->rounded, 0);
  crew_init(&work->crew, run_task, work->rounding_tasks + tiles * ((c->tokens + BLOCK - 1) / BLOCK));
  return work;
}

/* ---- As an XLA custom call. ---- */

/* Arguments and attributes as cpu.py passes them. */
XLA_FFI_Error *quantized_matmul(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  const int64_t num_matrices = frame->rets.size;
  if (num_matrices < 1 || num_matrices > MOST_MATRICES || frame->args.size != 1 + 3 * num_matrices)
    return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "quantized_matmul takes tokens, then codes, scales and zeros of 1 to 4 matrices, a result each");
  const XLA_FFI_Buffer *x = frame->args.args[0], *scales = frame->args.args[2];
  struct call call = {
      .x = x->data,
      .num_matrices = num_matrices,
      .tokens = x->dims[0],
      .inputs = x->dims[1],
      .groups = scales->dims[1],
      .is_int4 = *(const int32_t *)attribute(frame, "is_int4"),
      .is_bfloat16 = *(const int32_t *)attribute(frame, "is_bfloat16"),
  };
  for (int64_t i = 0; i < num_matrices; i++) {
    const XLA_FFI_Buffer *parts[3];
    for (int64_t j = 0; j < 3; j++) parts[j] = frame->args.args[1 + 3 * i + j];
    call.matrices[i] = (struct matrix){.codes = parts[0]->data,
                                       .scales = parts[1]->data,
                                       .zeros = parts[2]->dims[0] ? parts[2]->data : NULL,
                                       .out = ((XLA_FFI_Buffer *)frame->rets.rets[i])->data,
                                       .outputs = parts[0]->dims[0]};
  }
  const int64_t threads = threads_of(frame);
  struct work *work = plan(&call, threads);
  if (!work) return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for quantized_matmul's scratch");
  run(frame, &work->crew, least_of(threads, work->crew.num_tasks) - 1);
  return NULL;
}

#include "cpu_check.h"
