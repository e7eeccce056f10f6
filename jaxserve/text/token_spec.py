"""What any tokenizer file amounts to, whichever format it came in; knows no file and encodes nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from models.errors import CheckpointError, ModelError

BYTE_ALPHABET_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSpec:
    """A tokenizer as read from a checkpoint.

    Attributes:
      backend: encodes; its post-processor adds the begin and end tokens a prompt gets.
      special_tokens: role → text, e.g. `{"bos_token": "<s>"}`; roles the checkpoint leaves unset are absent.
      eos_token_ids: every id that ends an output, in the order found.
      chat_templates: name → jinja source; the plain one is called "default".
    """

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """What the tokenizers library refuses inside the `with` becomes a CheckpointError of this file.

    It raises a bare Exception for what it cannot build, and where it has a bug a panic, which is no Exception at all.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path}: no usable tokenizer: {error}") from None


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019, GPT-2), character → byte.

    Printable Latin-1 stands for itself, the 68 other bytes for the characters from U+0100 on: a space is "Ġ".
    """
    printable = [byte for span in BYTE_ALPHABET_PRINTABLE for byte in span]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def add_special_around(backend: Backend, *, bos_token: str | None, eos_token: str | None) -> None:
    """Makes the backend put these tokens before and after a prompt; None puts none there."""
    before, after = ([] if token is None else [token] for token in (bos_token, eos_token))
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=None,
        special_tokens=[(token, backend.token_to_id(token)) for token in before + after],
    )
