"""Block sizes of the kernels: a short formula for each, and a table of exceptions; knows no arrays."""

from dataclasses import dataclass

# --- TPU -------------------------------------------------------------------------------------------------------------

TPU_STEP_BYTES = 2 << 20  # a step's copies: long enough (1 to 3 us) to hide their own latency behind the step before
TPU_MAX_STEP_KEYS = 1024
TPU_TILE_SCORES = 32 * 1024  # float32 scores that the vector registers (64 x 1024 numbers) hold besides all else
TPU_QUERY_ROWS = 32  # fewer rows leave the MXU waiting for its next weights


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuSizes:
    """How the TPU kernel cuts its work; see `tpu.py`.

    Attributes:
      rows: of the region, handled by one program together.
      pages: copied by one step.
      query_rows: of the scores computed at once; divides rows * queries * group.
    """

    rows: int
    pages: int
    query_rows: int


# (queries, group, kv_heads, page_size, bytes of a token's key and value of one head): sizes found better by hand.
TPU_EXCEPTIONS: dict[tuple[int, int, int, int, int], TpuSizes] = {}


def tpu_sizes(*, queries: int, group: int, kv_heads: int, page_size: int, kv_bytes: int) -> TpuSizes:
    """Sizes for rows of `queries` tokens with `group` query heads a KV head; kv_bytes: of one token in one KV head.

    Rows are packed until a KV head has TPU_QUERY_ROWS query rows, in whole tiles of 16; a step takes as many pages as
    TPU_STEP_BYTES hold, within 128 and TPU_MAX_STEP_KEYS keys and the registers that their scores take.
    """
    exception = TPU_EXCEPTIONS.get((queries, group, kv_heads, page_size, kv_bytes))
    if exception is not None:
        return exception
    rows = 1
    while rows < 32 and (rows * queries * group < TPU_QUERY_ROWS or rows * queries * group % 16):
        rows *= 2
    query_rows = rows * queries * group
    keys = TPU_STEP_BYTES // (kv_heads * kv_bytes)
    keys = max(128, min(keys, TPU_MAX_STEP_KEYS, TPU_TILE_SCORES // min(query_rows, 128)))
    pages = max(1, 1 << (keys // page_size).bit_length() - 1 if keys >= page_size else 1)
    tile = max(
        (n for n in range(8, query_rows + 1, 8) if query_rows % n == 0 and n * pages * page_size <= TPU_TILE_SCORES),
        default=query_rows,
    )
    return TpuSizes(rows=rows, pages=pages, query_rows=tile)
