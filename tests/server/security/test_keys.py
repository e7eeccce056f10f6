"""API keys: where they come from, and that nothing about one is told."""

import pathlib

import pytest

from jaxserve.errors import ConfigError
from server.security.keys import KeyRing, read_keys

VARIABLE = "JAXSERVE_TEST_KEYS"


def test_keys_come_from_a_file_and_from_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the batch jobs\nbatch:first-secret\n\n  second-secret  \n")
    monkeypatch.setenv(VARIABLE, "web:third-secret, fourth-secret")
    ring = read_keys(str(file), VARIABLE, "setting")
    holders = [ring.holder(key) for key in (b"first-secret", b"second-secret", b"third-secret", b"fourth-secret")]
    assert holders == ["batch", "key-2", "web", "key-4"]
    assert ring.holder(b"fifth-secret") is None
    assert ring.holder(b"batch:first-secret") is None
    assert ring.holder(b"") is None


def test_no_key_anywhere_is_an_empty_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not read_keys(None, VARIABLE, "setting")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1: the key is shorter"),
        ("a:one-secret\na:two-secret\n", "line 2: the name 'a' stands twice"),
        ("a b:one-secret\n", "line 1: a name"),
    ],
)
def test_a_wrong_file_is_told_without_quoting_a_key(tmp_path: pathlib.Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_keys(str(file), VARIABLE, "server.security.api_keys_file")
    assert "secret" not in str(caught.value)


def test_a_missing_file_names_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"server\.security\.api_keys_file"):
        read_keys("/nowhere/keys", VARIABLE, "server.security.api_keys_file")


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr("server.security.keys.hmac.compare_digest", lambda a, b: (compared.append(b), a == b)[1])
    ring = KeyRing({f"k{i}": b"secret-%d" % i for i in range(4)})
    for shown in (b"secret-0", b"secret-3", b"none"):
        compared.clear()
        ring.holder(shown)
        assert len(compared) == 4
