"""Block sizes of the kernels: a short formula for each, and a table of exceptions; knows no arrays."""

from dataclasses import dataclass

# --- TPU -------------------------------------------------------------------------------------------------------------

TPU_STEP_BYTES = 2 << 20  # a step's copies: long enough (1 to 3 us) to hide their own latency behind the step before
TPU_MAX_STEP_KEYS = 512
TPU_TILE_SCORES = 32 * 1024  # float32 scores that the vector registers (64 x 1024 numbers) hold besides all else
TPU_TILE_SCORES_NARROW = 16 * 1024  # scales take registers too
TPU_TILE_SCORES_FLOAT32 = 2 * 1024  # exact products take six passes, and registers for their parts
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


def tpu_sizes(
    *,
    queries: int,
    group: int,
    kv_heads: int,
    page_size: int,
    kv_bytes: int,
    is_float32: bool,
    is_narrow: bool,
) -> TpuSizes:
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
    tile_scores = TPU_TILE_SCORES_FLOAT32 if is_float32 else TPU_TILE_SCORES
    keys = TPU_STEP_BYTES // (kv_heads * kv_bytes)
    keys = max(128, min(keys, TPU_MAX_STEP_KEYS, tile_scores // min(query_rows, 128)))
    pages = max(1, 1 << (keys // page_size).bit_length() - 1 if keys >= page_size else 1)
    if is_narrow:
        tile_scores = min(tile_scores, TPU_TILE_SCORES_NARROW)
    tile = max(
        (n for n in range(8, query_rows + 1, 8) if query_rows % n == 0 and n * pages * page_size <= tile_scores),
        default=query_rows,
    )
    return TpuSizes(rows=rows, pages=pages, query_rows=tile)


# --- GPU -------------------------------------------------------------------------------------------------------------

# Programs that a large GPU runs at once: about 132 multiprocessors (A100 108, H200 132, B200 148) with 2 programs each.
GPU_PROGRAMS = 264
# Pieces are cut so that programs fill the GPU this many times: with 4, the last, half-filled round costs an eighth at
# the worst, and a program still takes many times longer than it takes to fill its pipeline.
GPU_ROUNDS = 4
GPU_SHARED_BYTES = 227 * 1024  # that one program may have on Hopper and Blackwell; two share as much
LEAST_PIECE_KEYS = 512
SCALE_COPY_BYTES = 128  # the least that TMA copies


@dataclass(frozen=True, kw_only=True, slots=True)
class MosaicBlocks:
    """What one program of the Mosaic kernel takes at a time; see `gpu_mosaic.py`.

    Attributes:
      keys: of one block.
      slots: blocks in shared memory at once.
      row_parts, column_parts: warpgroups, each with a tile of the query rows and a part of the values' columns.
      weights: tiles of shared memory for softmax weights; 0 where they take the place of keys.
    """

    keys: int
    slots: int
    row_parts: int
    column_parts: int
    weights: int

    @property
    def warpgroups(self) -> int:
        return self.row_parts * self.column_parts


def mosaic_blocks(
    *, query_rows: int, head_dim: int, itemsize: int, tile_rows: int, kv_bytes: int, scale_copies: int
) -> MosaicBlocks:
    """Blocks for `query_rows` (queries times heads that share a KV head), of which a warpgroup takes `tile_rows`.

    Args:
      itemsize: of queries and weights.
      kv_bytes: of a token's key and value in one KV head, without scales.
      scale_copies: of a block; 0 where the format has no scales.
    """
    column_parts = 1 if head_dim <= 128 else 2  # a warpgroup's registers hold 128 columns
    # A thread that has a whole row in its registers, 128 values and 64 scores, has too few left for masks; and a block
    # that is widened leaves less shared memory.
    keys = 32 if (tile_rows == 128) + (head_dim > 128) + (scale_copies > 0) > 1 else 64
    row_parts = 2 if column_parts == 1 and tile_rows == 64 and query_rows > 64 else 1
    warpgroups = row_parts * column_parts
    # Two programs share a multiprocessor, and hide each other's waits, where they fit.
    programs = 2 if warpgroups == 1 else 1
    weights = 0 if warpgroups == 1 and tile_rows == keys <= head_dim else warpgroups
    queries_and_weights = tile_rows * (row_parts * head_dim + weights * keys) * itemsize
    spare = GPU_SHARED_BYTES // programs - 1024 - queries_and_weights
    if scale_copies:  # a block is widened before it is multiplied; arrays begin at whole KiB
        spare -= keys * 2 * head_dim * itemsize + 1024
    slots = min(8, spare // (keys * kv_bytes + scale_copies * SCALE_COPY_BYTES))
    return MosaicBlocks(keys=keys, slots=slots, row_parts=row_parts, column_parts=column_parts, weights=weights)


def gpu_pieces_wanted(programs_per_piece: int) -> int:
    """Into how many pieces a step's rows are cut, where each piece is the work of so many programs."""
    return max(1, GPU_ROUNDS * GPU_PROGRAMS // programs_per_piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonBlocks:
    """What one program of the Triton kernel takes at a time; see `gpu_triton.py`.

    Attributes:
      rows: of the queries, a power of two; a tensor core takes 16.
      keys: of one block.
      warps: of the program.
      stages: blocks in shared memory at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def triton_blocks(*, query_rows: int, head_dim: int, itemsize: int) -> TritonBlocks:
    """Blocks for `query_rows` (queries times the heads that share a KV head) of one KV head."""
    most_rows = 64 if itemsize < 4 else 16  # float32 multiplies without tensor cores, and spills above
    rows = min(most_rows, max(16, 1 << (query_rows - 1).bit_length()))
    keys = 64 if head_dim * itemsize <= 256 else 32
    return TritonBlocks(rows=rows, keys=keys, warps=4, stages=2)
