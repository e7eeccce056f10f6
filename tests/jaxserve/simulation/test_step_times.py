"""The step-time table: reading between and beyond its points, and its file."""

from pathlib import Path

import pytest
from tiny_engine import TinyOptions, tiny_config

from jaxserve.device.buckets import StepShape
from jaxserve.errors import ConfigError
from jaxserve.simulation.step_times import StepTime, StepTimes, config_digest

# Seconds are 1 ms a token of the shape (blocks have 10) and 1 µs a key, except where a test says otherwise.
MEASURED = [(1, 0), (8, 0), (16, 0), (16, 2), (16, 8)]


def table(*steps: tuple[int, int, int, float]) -> StepTimes:
    linear = [
        (rows, blocks, kv_tokens, (rows + 10 * blocks) * 1e-3 + kv_tokens * 1e-6)
        for rows, blocks in MEASURED
        for kv_tokens in (100, 1000, 4000)
    ]
    return StepTimes(
        device="cpu",
        jax_version="0",
        model="tiny",
        config_digest="d",
        block_q=10,
        steps=tuple(
            StepTime(decode_rows=rows, prefill_blocks=blocks, kv_tokens=kv_tokens, seconds=seconds)
            for rows, blocks, kv_tokens, seconds in steps or linear
        ),
    )


@pytest.mark.parametrize(
    ("rows", "blocks", "kv_tokens", "seconds"),
    [
        (8, 0, 1000, 0.009),  # a point of the table
        (8, 0, 2500, 0.0105),  # between two
        (5, 0, 1000, 0.009),  # runs in the 8-row program
        (0, 1, 1000, 0.037),  # a prompt runs beside all 16 decode rows, in 2 blocks
        (16, 8, 10_000, 0.106),  # beyond the last point
        (1, 0, 0, 0.001),  # before the first
        (32, 0, 1000, 0.033),  # more rows than any program has
        (16, 16, 1000, 0.177),
    ],
)
def test_a_step_takes_what_its_compiled_shape_and_its_keys_cost(
    rows: int, blocks: int, kv_tokens: int, seconds: float
) -> None:
    assert table().estimate(rows, blocks, kv_tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rows", "blocks", "seconds"),
    [(4, 0, 0.005), (12, 0, 0.013), (64, 0, 0.065), (16, 4, 0.057), (8, 2, 0.029), (4, 1, 0.015)],
)
def test_a_shape_that_was_not_measured_lies_between_its_neighbours(rows: int, blocks: int, seconds: float) -> None:
    shape = StepShape(decode_rows=rows, prefill_blocks=blocks)
    assert table().of_shape(shape, 1000) == pytest.approx(seconds)


def test_noise_never_makes_a_step_faster_by_more_keys() -> None:
    times = table((8, 0, 100, 0.5), (8, 0, 200, 0.4), (8, 0, 300, 0.6))
    assert [times.estimate(8, 0, kv_tokens) for kv_tokens in (100, 200, 300, 400)] == pytest.approx(
        [0.5, 0.5, 0.6, 0.7]
    )


def test_no_extension_goes_below_zero() -> None:
    times = table((8, 0, 100, 0.1), (8, 0, 200, 0.3), (16, 0, 100, 0.5))
    assert times.estimate(8, 0, 0) == 0.0
    assert times.of_shape(StepShape(decode_rows=1, prefill_blocks=0), 100) == 0.0
    assert times.estimate(16, 0, 10_000) == 0.5  # one point alone says nothing about keys


def test_shapes_come_in_the_order_in_which_a_step_looks_for_one() -> None:
    assert [(shape.decode_rows, shape.prefill_blocks) for shape in table().shapes] == MEASURED


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    times = table()
    path = tmp_path / "new" / "times.json"
    times.write(path)
    assert StepTimes.read(path) == times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no step times: the file: Invalid JSON"),
        ("{}", "holds no step times: device: Field required"),
        (table().model_dump_json().replace('"seconds":0.002', '"seconds":-1.0'), r"steps.1.seconds: .*greater than 0"),
        (table().model_dump_json().replace('"kv_tokens":1000', '"kv_tokens":100'), "listed twice"),
        (table().model_dump_json().replace('"decode_rows":1,', '"decode_rows":0,'), "neither decode rows nor"),
    ],
)
def test_a_file_that_is_no_table_is_a_config_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        StepTimes.read(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the step times .*No such file"):
        StepTimes.read(tmp_path / "none.json")


def test_the_digest_follows_what_decides_a_steps_time_and_nothing_else() -> None:
    digest = config_digest(tiny_config(TinyOptions()))
    assert config_digest(tiny_config(TinyOptions(num_pages=9, max_model_len=64, strict_shapes=True))) != digest
    assert config_digest(tiny_config(TinyOptions(num_pages=99, strict_shapes=True))) == digest
    assert config_digest(tiny_config(TinyOptions(decode_buckets=(8,)))) != digest
    assert config_digest(tiny_config(TinyOptions(page_size=16))) != digest
