"""Reads and writes a tokenizer in a Hugging Face folder (an Orbax checkpoint has the same files); knows no GGUF."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.text.token_spec import TokenizerSpec, blamed_on
from models.checkpoint.hf_config import read_json
from models.errors import CheckpointError, UnsupportedModelError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_TOKEN_ID = re.compile("[0-9]{1,9}")


def read_folder_tokenizer(folder: Path) -> TokenizerSpec:
    """The tokenizer beside a checkpoint's weights: `tokenizer.json` and, where present, the files around it.

    As in transformers, a chat template in its own file wins over the one in `tokenizer_config.json`, and the begin and
    end tokens around a prompt are those of tokenizer.json's post-processor, whatever `add_bos_token` says in the
    configuration: that flag is for building a tokenizer.json.

    Raises:
      CheckpointError: a file is missing or damaged, or names a token that the vocabulary lacks.
      UnsupportedModelError: only a format other than `tokenizer.json` is there.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedModelError(f"{folder} has a tokenizer.model but no tokenizer.json; only that is read")
        raise CheckpointError(f"{folder} has no tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    roles = {**_read_json(folder / "special_tokens_map.json"), **config}
    generation = _read_json(folder / "generation_config.json")
    with blamed_on(path):
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
        backend.no_truncation()
        backend.no_padding()
    unknown = getattr(backend.model, "unk_token", None)
    if unknown is not None and backend.model.token_to_id(unknown) is None:
        # The library would find out at the first text that needs it, with an exception that names no file.
        raise CheckpointError(f"{path}: the unknown token {unknown!r} is not in the vocabulary")

    special_tokens = {role: _token_text(folder, role, roles[role]) for role in ROLES if roles.get(role) is not None}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        special_tokens.update({role: _token_text(folder, role, token) for role, token in extra.items() if token})
    with blamed_on(path):
        _add_configured_tokens(folder, backend, config, special_tokens.values())
    return TokenizerSpec(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_eos_ids(folder, backend, special_tokens, generation),
        chat_templates=_chat_templates(folder, config),
    )


def write_folder_tokenizer(spec: TokenizerSpec, folder: Path) -> None:
    """Writes the files from which `read_folder_tokenizer` makes an equal tokenizer, into an existing folder."""
    (folder / "tokenizer.json").write_text(spec.backend.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    named = {role: token for role, token in spec.special_tokens.items() if role in ROLES}
    extra = {role: token for role, token in spec.special_tokens.items() if role not in ROLES}
    _write_json(
        folder / "tokenizer_config.json", {**config, **named, **({"extra_special_tokens": extra} if extra else {})}
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": list(spec.eos_token_ids)})
    for name, source in spec.chat_templates.items():
        path = folder / (TEMPLATE_FILE if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.encode())


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token_text(folder: Path, role: str, token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {role} is {token!r}, no token")
    return text


def _add_configured_tokens(
    folder: Path, backend: Backend, config: Mapping[str, Any], special_tokens: Iterable[str]
) -> None:
    """Adds what the configuration knows beyond tokenizer.json, and makes every token that has a role special."""
    declared = config.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is no JSON object")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in declared):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has a key that is no token id")
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _token_text(folder, f"added_tokens_decoder[{token_id}]", token)
        if text in known:
            continue
        said = token if isinstance(token, dict) else {}
        flags = {name: bool(said[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in said}
        added = AddedToken(text, special=bool(said.get("special", False)), **flags)
        backend.add_special_tokens([added]) if added.special else backend.add_tokens([added])
        known.add(text)
        special |= {text} if added.special else set()
        if backend.token_to_id(text) != int(token_id):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: {text!r} is token {token_id}, but tokenizer.json leaves it "
                f"id {backend.token_to_id(text)}"
            )
    for text in special_tokens:
        if text not in special:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            special.add(text)


def _eos_ids(
    folder: Path, backend: Backend, special_tokens: Mapping[str, str], generation: Mapping[str, Any]
) -> tuple[int, ...]:
    declared = generation.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    limit = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= limit:
            raise CheckpointError(
                f"{folder / 'generation_config.json'}: eos_token_id {token_id!r}; the tokenizer has ids 0 to {limit}"
            )
    own = [backend.token_to_id(special_tokens["eos_token"])] if "eos_token" in special_tokens else []
    return tuple(dict.fromkeys([*own, *ids]))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {"default": folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if files:
        try:
            return {name: path.read_bytes().decode() for name, path in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder}: a chat template is unreadable: {error}") from error
    declared = config.get("chat_template")
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in declared}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named templates"
        ) from error
