"""The closed set of step shapes that are compiled before ready; a step runs in the smallest that holds it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """A compiled step's capacity: decode rows and prefill blocks."""

    decode_rows: int
    prefill_blocks: int

    def __str__(self) -> str:
        return f"{self.decode_rows} decode rows + {self.prefill_blocks} prefill blocks"


def step_shapes(decode_buckets: tuple[int, ...], prefill_buckets: tuple[int, ...]) -> tuple[StepShape, ...]:
    """Every shape, smallest first.

    Steps without prompts come in each decode size. Steps with prompts carry the full number of decode rows: beside a
    block of prompt tokens, a few idle rows cost little, and the number of programs stays a sum, not a product.
    """
    decode_only = [StepShape(decode_rows=rows, prefill_blocks=0) for rows in sorted(decode_buckets)]
    rows = max(decode_buckets)
    mixed = [StepShape(decode_rows=rows, prefill_blocks=blocks) for blocks in sorted(prefill_buckets)]
    return (*decode_only, *mixed)


def choose_shape(shapes: tuple[StepShape, ...], decode_rows: int, prefill_blocks: int) -> StepShape:
    """The first, so the smallest, that holds the step; the scheduler never plans one that none holds."""
    for shape in shapes:
        if shape.decode_rows >= decode_rows and shape.prefill_blocks >= prefill_blocks:
            return shape
    raise AssertionError(f"no compiled step holds {decode_rows} decode rows and {prefill_blocks} prefill blocks")


def doublings(smallest: int, limit: int) -> tuple[int, ...]:
    """`limit` and its halves down to `smallest`: `doublings(4, 24) == (6, 12, 24)`."""
    sizes = [limit]
    while sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))
