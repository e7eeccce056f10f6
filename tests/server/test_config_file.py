"""One configuration from file, --set and flags; what is wrong is told with its key, its origin and the nearest name."""

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.config_file import config_yaml, read_config
from jaxserve.errors import ConfigError
from server.config import ServeConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_deployment_in_configs_loads(path: Path) -> None:
    assert read_config(ServeConfig, path=path) != ServeConfig()


def test_there_is_a_deployment_for_each_kind_of_machine() -> None:
    assert {path.name for path in CONFIGS.glob("*.yaml")} >= {"cpu-demo.yaml", "tpu-v5e.yaml", "gpu-h200.yaml"}


def test_flags_win_over_assignments_which_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "scheduler: {max_num_seqs: 2}\ncache: {page_size: 8}\nserver: {port: 1}\n")
    config = read_config(
        ServeConfig,
        path=path,
        assignments=["server.port=2", "cache.page_size=32", "cache.page_size=64"],
        flags={"server.port": ("--port", "3")},
    )
    assert (config.scheduler.max_num_seqs, config.cache.page_size, config.server.port) == (2, 64, 3)


def test_what_is_printed_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = read_config(
        ServeConfig,
        assignments=["execution.decode_buckets=[1, 16]", "execution.compilation_cache=null", "model.name=ü"],
    )
    assert read_config(ServeConfig, path=written(tmp_path, config_yaml(config))) == config


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "scheduler:\n", "scheduler:\n  # max_num_seqs: 3\ncache: {page_size: auto}\n"]
)
def test_empty_files_and_sections_keep_the_defaults(tmp_path: Path, text: str) -> None:
    assert read_config(EngineConfig, path=written(tmp_path, text)) == EngineConfig()


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("scheduler.max_num_seq=3", ["scheduler.max_num_seq ", "did you mean scheduler.max_num_seqs?"]),
        ("max_num_seqs=3", ["did you mean scheduler.max_num_seqs?"]),
        ("shceduler.max_num_seqs=3", ["did you mean scheduler?"]),
        ("scheduler.colour=red", ["known here: max_num_seqs, max_num_batched_tokens"]),
        ("scheduler.max_num_seqs=0", ["scheduler.max_num_seqs is 0", "greater than 0"]),
        ("scheduler.max_num_seqs=many", ["scheduler.max_num_seqs is 'many'", "valid integer"]),
        ("cache.num_pages=few", ["cache.num_pages is 'few'", "valid integer", "'auto'"]),
        ("cache.memory_fraction=.nan", ["cache.memory_fraction is nan", "finite"]),
        ("cache.memory_fraction=1.5", ["cache.memory_fraction is 1.5", "less than or equal to 1"]),
        ("execution.decode_buckets=[1, 0]", ["execution.decode_buckets is 0", "greater than 0"]),
        ("scheduler=3", ["scheduler is 3", "dictionary"]),
        ("cache.page_size.x=1", ["cache.page_size is {'x': 1}"]),
        ("scheduler.max_num_seqs=[}", ["not valid YAML"]),
        ("scheduler.max_num_seqs", ["section.name=value"]),
        ("scheduler..max_num_seqs=1", ["section.name=value"]),
        ("server.port=70000", ["server.port is 70000", "65535"]),
    ],
)
def test_a_wrong_assignment_is_told_with_key_origin_and_remedy(assignment: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(ServeConfig, assignments=[assignment])
    message = str(caught.value)
    assert f"--set {assignment}" in message
    assert [part for part in told if part not in message] == []
    assert "\n" not in message


def test_all_wrong_keys_are_told_at_once_with_their_files(tmp_path: Path) -> None:
    path = written(tmp_path, "modle: {path: x}\ncache: {pages: 3}\n")
    with pytest.raises(ConfigError) as caught:
        read_config(ServeConfig, path=path, assignments=["sched.x=1"])
    message = str(caught.value)
    assert message.count(str(path)) == 2
    assert "did you mean model?" in message
    assert "cache.pages" in message
    assert "sched" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", "list"),
        ("cache: {page_size: 8, page_size: 16}\n", "'page_size' stands twice"),
        ("cache: [unclosed\n", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_config(ServeConfig, path=path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(ServeConfig, path=tmp_path / "none.yaml")
