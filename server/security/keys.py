"""Owns the API keys: reads them from a file or the environment, and tells whose key a request shows."""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxserve.errors import ConfigError
from server.config import SecuritySection

MIN_KEY_BYTES = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeyRing:
    """Keys by the name of their holder. Only digests are kept, so that neither a dump nor a log can show a key."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._digests = {name: hashlib.sha256(key).digest() for name, key in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, shown: bytes) -> str | None:
        """Whose key this is, in a time that tells nothing: every key is compared, whichever matches."""
        digest = hashlib.sha256(shown).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def read_keys(file: str | None, variable: str, setting: str) -> KeyRing:
    """The keys of a file, one a line, and of an environment variable, separated by commas or spaces.

    An entry is a key, or a name and a key as `name:key`; the name appears in logs and owns the rate limits. A line that
    begins with `#` is a comment.

    Args:
      setting: the configuration key that names the file, for errors.

    Raises:
      ConfigError: the file cannot be read or holds none, or a key or name is no such thing. It never quotes a key.
    """
    entries: list[tuple[str, str]] = []
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"cannot read the keys in {file}: {reason} ({setting})") from None
        stripped = [line.strip() for line in lines]
        entries += [
            (f"{file}, line {number}", line)
            for number, line in enumerate(stripped, start=1)
            if line and not line.startswith("#")
        ]
        if not entries:
            raise ConfigError(f"{file} holds no key ({setting})")
    words = re.split(r"[,\s]+", os.environ.get(variable, ""))
    entries += [(f"{variable}, entry {number}", word) for number, word in enumerate(filter(None, words), start=1)]
    return KeyRing(_by_name(entries))


def read_api_keys(security: SecuritySection) -> KeyRing:
    return read_keys(security.api_keys_file, security.api_keys_variable, "server.security.api_keys_file")


def read_admin_keys(security: SecuritySection) -> KeyRing:
    return read_keys(security.admin_keys_file, security.admin_keys_variable, "server.security.admin_keys_file")


def _by_name(entries: Iterable[tuple[str, str]]) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for place, entry in entries:
        name, colon, key = entry.partition(":")
        if not colon:
            name, key = f"key-{len(keys) + 1}", entry
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{place}: a name is made of 1 to 64 letters, digits, dots, dashes and underscores")
        if len(key.encode()) < MIN_KEY_BYTES:
            raise ConfigError(f"{place}: the key is shorter than {MIN_KEY_BYTES} bytes")
        if name in keys:
            raise ConfigError(f"{place}: the name {name!r} stands twice")
        keys[name] = key.encode()
    return keys
