"""Tokenizers from every format agree with the reference implementations and with each other."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tiny_metadata import TINY_SPECIALS, tiny_metadata
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.errors import InvalidRequestError
from jaxserve.text.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer, merges_from_scores
from jaxserve.text.token_spec import TokenizerSpec
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from models.checkpoint.gguf_file import read_gguf
from models.errors import CheckpointError, UnsupportedModelError

TEXTS = ["Hello, world!", "  the 日本 😀 é e\u0301\n", "<|start|>the<|end|> <tool>", "", "\x00\x7f"]


def build(**overrides: Any) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(Path("tiny.gguf"), tiny_metadata(**overrides)))


def test_byte_level_ids_equal_llama_cpps_for_every_pre_tokenizer(golden: Any, smollm2_path: Path) -> None:
    metadata = read_gguf(smollm2_path).metadata
    checked = golden["byte_level"]["encoded"]
    for name, expected in checked.items():
        tokenizer = Tokenizer(build_gguf_tokenizer(smollm2_path, metadata | {"tokenizer.ggml.pre": name}))
        assert tokenizer.encode_batch(golden["byte_level"]["texts"], add_special_tokens=False) == expected, name
    # names that share their regexes with a checked one need no file of their own
    assert {PRE_TOKENIZERS[name] for name in checked} == set(PRE_TOKENIZERS.values())


def test_sentencepiece_ids_equal_sentencepieces_and_llama_cpps(golden: Any, sentencepiece: Tokenizer) -> None:
    for source in ("encoded", "encoded_by_llama_cpp"):
        expected = golden["sentencepiece"][source]
        assert {text: sentencepiece.encode(text, add_special_tokens=False) for text in expected} == expected


def test_broken_bytes_read_as_in_sentencepiece(golden: Any, sentencepiece: Tokenizer) -> None:
    for ids, text in golden["sentencepiece"]["decoded_bytes"]:
        assert sentencepiece.decode(ids) == text


def test_embedded_model_loads_quickly_and_knows_its_tokens(smollm2: Tokenizer, smollm2_path: Path) -> None:
    started = time.process_time()
    load_tokenizer(smollm2_path)
    assert time.process_time() - started < 2.0
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.add_bos) == (1, (2,), False)
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smollm2.special_token_ids == frozenset(range(17))
    assert list(smollm2.chat_templates) == ["default"]
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_vocabulary_without_a_byte_shortens_the_text_as_the_reference_does(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\x04b")) == "ab"


@given(text=st.text())
def test_every_text_comes_back_from_a_complete_vocabulary(text: str) -> None:
    for tokenizer in (TINY, SPACED):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


TINY = build()
SPACED = build(pre="llama-bpe")  # other pieces, same bytes


@given(ids=st.lists(st.integers(0, TINY.vocab_size + 5)), skip=st.booleans())
def test_decode_equals_the_tokenizers_library(ids: list[int], skip: bool) -> None:
    assert TINY.decode(ids, skip_special_tokens=skip) == TINY.spec.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["tiny", "sentencepiece"])
def test_decode_is_the_join_of_token_bytes(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("the 日本 😀 naïve", add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix(" " if tokenizer.strips_leading_space else "") == "the 日本 😀 naïve"


def test_added_tokens_are_literal_bytes_and_holes_are_empty(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(token_id).decode() for token_id in range(4)] == TINY_SPECIALS
    assert tiny.token_bytes(4 + 0xFF) == b"\xff"
    assert tiny.token_text(4 + 0xFF) == "\ufffd"
    assert tiny.token_bytes(tiny.vocab_size) == tiny.token_bytes(-1) == b""


def test_control_tokens_are_hidden_and_user_defined_ones_are_not(tiny: Tokenizer) -> None:
    assert tiny.special_token_ids == {0, 1, 3}
    assert tiny.decode([0, 2, 1]) == "<tool>"
    assert tiny.decode([0, 2, 1], skip_special_tokens=False) == "<|start|><tool><|end|>"


@pytest.mark.parametrize("method", ["encode", "encode_chat"])
def test_lone_surrogate_is_refused(tiny: Tokenizer, method: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D at character 2") as caught:
        getattr(tiny, method)("ab\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tiny.encode_batch(["ok", "\udc00"])


def test_prompt_gets_bos_where_the_file_says_so() -> None:
    plain, bos, both = build(), build(add_bos_token=True), build(add_bos_token=True, add_eos_token=True)
    assert [t.add_bos for t in (plain, bos, both)] == [False, True, True]
    body = plain.encode("the")
    assert bos.encode("the") == [0, *body]
    assert both.encode("the") == [0, *body, 1]
    assert both.encode("the", add_special_tokens=False) == body
    assert build(pre="llama-bpe").add_bos  # the family's own default
    assert not build(pre="llama-bpe", add_bos_token=False).add_bos


def test_templated_text_never_gets_a_second_bos() -> None:
    with_bos = build(add_bos_token=True, add_eos_token=True)
    body = with_bos.encode("the", add_special_tokens=False)
    assert with_bos.encode_chat("<|start|>the") == [0, *body]
    assert with_bos.encode_chat("the") == [0, *body]  # this template leaves it to the tokenizer
    assert build().encode_chat("the") == body
    assert build().encode_chat("<|start|>the") == [0, *body]


def test_every_end_token_of_a_gguf_ends_an_output() -> None:
    assert build(eot_token_id=3, eom_token_id=2).eos_token_ids == (1, 3, 2)
    assert build(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("name", ["smollm2", "tiny", "sentencepiece"])
def test_saved_tokenizer_loads_as_the_same(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    save_tokenizer(tokenizer, tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")
    for attribute in ("vocab_size", "bos_token_id", "eos_token_ids", "special_token_ids", "special_tokens", "add_bos"):
        assert getattr(loaded, attribute) == getattr(tokenizer, attribute), attribute
    assert loaded.chat_templates == tokenizer.chat_templates
    assert (loaded.utf8_errors, loaded.strips_leading_space) == (tokenizer.utf8_errors, tokenizer.strips_leading_space)
    ids = range(tokenizer.vocab_size)
    assert all(loaded.token_bytes(token_id) == tokenizer.token_bytes(token_id) for token_id in ids)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_gguf_file_is_read_as_its_metadata_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    metadata = tiny_metadata(add_bos_token=True) | {"tokenizer.chat_template.tool_use": "tools"}
    write_gguf(path, metadata)
    assert metadata.items() <= read_gguf(path).metadata.items()
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_batch(TEXTS) == build(add_bos_token=True).encode_batch(TEXTS)
    assert tokenizer.chat_templates == {"default": metadata["tokenizer.chat_template"], "tool_use": "tools"}


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_truncated_gguf_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_metadata())
    whole = path.read_bytes()
    end = whole.index(b"tokenizer.chat_template")
    for length in [*range(0, 200), *range(200, end, 97)]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"pre": "klingon"}, UnsupportedModelError, r"pre-tokenizer 'klingon' \(tokenizer\.ggml\.pre\) is not known"),
        ({"model": "bert"}, UnsupportedModelError, r"tokenizer\.ggml\.model 'bert' is not supported"),
        ({"model": None}, UnsupportedModelError, "None is not supported"),
        ({"tokens": None}, CheckpointError, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"tokens": [1, 2]}, CheckpointError, r"tokenizer\.ggml\.tokens is no array of str"),
        ({"token_type": [1]}, CheckpointError, "token_type has 1 entries for"),
        ({"merges": ["z", "a b"]}, CheckpointError, "substring not found"),
        ({"merges": ["zz yy"]}, CheckpointError, "out of vocabulary"),
        ({"bos_token_id": 10**6}, CheckpointError, r"bos_token_id is 1000000; the vocabulary has ids 0 to"),
        ({"eos_token_id": "1"}, CheckpointError, "eos_token_id is '1'"),
        ({"add_bos_token": 1}, CheckpointError, "add_bos_token is 1, not a boolean"),
        ({"model": "llama"}, CheckpointError, "scores has 0 entries"),
    ],
)
def test_unsound_gguf_metadata_is_refused_by_name(overrides: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(**overrides)


def test_padding_by_an_ordinary_token_does_not_hide_it() -> None:
    ordinary = build(padding_token_id=4 + ord("!"))
    assert "pad_token" not in ordinary.special_tokens
    assert ordinary.decode(ordinary.encode("a!")) == "a!"
    assert build(padding_token_id=3).special_tokens["pad_token"] == TINY_SPECIALS[3]


def test_end_token_marked_as_ordinary_text_is_hidden_all_the_same() -> None:
    kinds = tiny_metadata()["tokenizer.ggml.token_type"]
    assert build(token_type=[3, 1, *kinds[2:]]).special_token_ids == {0, 1, 3}


def test_added_token_of_accented_letters_is_not_read_as_bytes() -> None:
    metadata = tiny_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = build(tokens=[*tokens, "ünï"], token_type=[*kinds, 4])
    assert tokenizer.encode("xünï")[1:] == [len(tokens)]
    assert tokenizer.decode([len(tokens)]) == "ünï"  # the byte alphabet has these letters, for other bytes


def test_some_families_take_a_whole_piece_before_any_merge() -> None:
    metadata = tiny_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    unreachable = {"tokens": [*tokens, "xyz"], "token_type": [*kinds, 1]}  # no merge makes it
    assert build(pre="tekken", add_bos_token=False, **unreachable).encode("xyz") == [len(tokens)]
    assert len(build(pre="smollm", **unreachable).encode("xyz")) == 3


def test_sentencepiece_joins_the_best_scored_pair_first() -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    common = {"model": "llama", "tokens": tokens, "token_type": [2, 1, 1, 1, 1, 1], "add_space_prefix": False}
    common |= {"bos_token_id": None, "eos_token_id": None}
    assert build(scores=[0.0, 0.0, 0.0, 0.0, -1.0, -2.0], **common).encode("abc") == [4, 3]
    assert build(scores=[0.0, 0.0, 0.0, 0.0, -2.0, -1.0], **common).encode("abc") == [1, 5]


def test_text_that_spells_a_byte_token_stays_text() -> None:
    tokens = ["<unk>", "<0x41>", "<", "0", "x", "4", "1", ">", "<0", "<0x", "<0x4", "<0x41"]
    common = {"bos_token_id": None, "eos_token_id": None, "add_space_prefix": False, "scores": [0.0] * len(tokens)}
    spelled = build(model="llama", tokens=tokens, token_type=[2, 6] + [1] * 10, **common)
    assert spelled.encode("<0x41>") == [tokens.index("<0x41"), tokens.index(">")]
    assert spelled.token_bytes(1) == b"A"


def test_qwen_text_is_composed_before_it_is_cut() -> None:
    assert build(pre="qwen2").encode("e\u0301") == build(pre="qwen2").encode("é")
    assert build(pre="smollm").encode("e\u0301") != build(pre="smollm").encode("é")


def test_one_token_may_begin_and_end_a_prompt() -> None:
    both = build(eos_token_id=0, add_bos_token=True, add_eos_token=True)
    assert both.encode("x") == [0, *build().encode("x"), 0]


def test_token_listed_twice_is_refused() -> None:
    tokens = tiny_metadata()["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match=r"tokens 5 and \d+ are both"):
        build(tokens=[*tokens, tokens[5]], token_type=None)


@pytest.fixture
def folder(tmp_path: Path, tiny: Tokenizer) -> Path:
    """A Hugging Face folder with tokenizer.json alone."""
    (tmp_path / "tokenizer.json").write_text(tiny.spec.backend.to_str(), encoding="utf-8")
    return tmp_path


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_folder_with_tokenizer_json_alone_is_enough(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_tokens) == (None, (), {})
    assert tokenizer.decode(tokenizer.encode("the 😀")) == "the 😀"


def test_eos_is_the_union_of_tokenizer_and_generation_config(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
    assert load_tokenizer(folder).eos_token_ids == (1,)
    put(folder, "generation_config.json", {"eos_token_id": [3, 1]})
    assert load_tokenizer(folder).eos_token_ids == (1, 3)
    put(folder, "generation_config.json", {"eos_token_id": 3})
    assert load_tokenizer(folder).eos_token_ids == (1, 3)


@pytest.mark.parametrize("value", [-1, 10**6, "3", True, [0, None]])
def test_eos_id_that_is_none_is_refused(folder: Path, value: Any) -> None:
    put(folder, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id .*ids 0 to \d+"):
        load_tokenizer(folder)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("adds", [True, False])
def test_post_processor_decides_about_bos_whatever_the_flag(folder: Path, adds: bool, flag: bool | None) -> None:
    put(folder, "tokenizer.json", build(add_bos_token=adds).spec.backend.to_str())
    flags = {} if flag is None else {"add_bos_token": flag}
    put(folder, "tokenizer_config.json", {"bos_token": "<|start|>", **flags})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.add_bos == adds
    assert (tokenizer.encode("the")[0] == 0) == adds


def test_special_tokens_map_fills_what_the_config_leaves_out(folder: Path) -> None:
    put(folder, "special_tokens_map.json", {"bos_token": "<|start|>", "eos_token": "<tool>"})
    put(folder, "tokenizer_config.json", {"eos_token": "<|end|>", "pad_token": None})
    assert load_tokenizer(folder).special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_token_with_a_role_is_special_even_if_tokenizer_json_does_not_say_so(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": "<tool>"})
    assert load_tokenizer(folder).special_token_ids == {0, 1, 2, 3}


def test_added_tokens_of_the_config_are_added_at_their_ids(folder: Path, tiny: Tokenizer) -> None:
    new = {str(tiny.vocab_size): {"content": "<new>", "special": True}, "0": {"content": "<|start|>", "special": True}}
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": new, "extra_special_tokens": {"new_token": "<new>"}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<new>") == [tiny.vocab_size]
    assert tokenizer.special_tokens == {"new_token": "<new>"}
    save_tokenizer(tokenizer, folder / "again")
    assert load_tokenizer(folder / "again").special_tokens == {"new_token": "<new>"}
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<new>"}}})
    with pytest.raises(CheckpointError, match=r"'<new>' is token 9999, but tokenizer\.json leaves it"):
        load_tokenizer(folder)


def test_truncation_and_padding_of_tokenizer_json_are_ignored(folder: Path, tiny: Tokenizer) -> None:
    backend = Backend.from_str(tiny.spec.backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    put(folder, "tokenizer.json", backend.to_str())
    assert load_tokenizer(folder).encode("hello") == tiny.encode("hello")


def test_template_file_wins_over_the_config(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"chat_template": "from config"})
    assert load_tokenizer(folder).chat_templates == {"default": "from config"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    put(folder, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(folder).chat_templates == {"default": "d", "tool_use": "t"}
    put(folder, "chat_template.jinja", "from file\n")
    (folder / "additional_chat_templates").mkdir()
    put(folder / "additional_chat_templates", "rag.jinja", "documents")
    assert load_tokenizer(folder).chat_templates == {"default": "from file\n", "rag": "documents"}
    save_tokenizer(load_tokenizer(folder), folder / "again")
    assert load_tokenizer(folder / "again").chat_templates == {"default": "from file\n", "rag": "documents"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "no usable tokenizer"),
        ("tokenizer.json", '{"model": {}}', "no usable tokenizer"),
        ("tokenizer_config.json", "[]", "a JSON object is expected"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is 3, no token"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template is neither"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder is no JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"9" * 5000: "a"}}), "added_tokens_decoder"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "cannot be read as JSON"),
        ("tokenizer_config.json", '{"x":' * 100_000, "cannot be read as JSON"),
        ("generation_config.json", "nonsense", "cannot be read as JSON"),
    ],
)
def test_damaged_file_is_refused_by_name(folder: Path, name: str, content: str, words: str) -> None:
    put(folder, name, content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(folder)
    assert name in str(caught.value)


def test_a_configured_token_may_be_its_text_alone(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": {"2": "lstrip"}})
    with pytest.raises(CheckpointError, match="'lstrip' is token 2, but"):
        load_tokenizer(folder)


def test_an_id_beyond_every_vocabulary_is_refused_before_memory_is_taken_for_it(folder: Path) -> None:
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"]["far"] = 2**32 - 1
    put(folder, "tokenizer.json", json.dumps(described))
    with pytest.raises(UnsupportedModelError, match=f"{folder}: token id {2**32 - 1} is beyond the highest"):
        load_tokenizer(folder)


def test_an_unknown_token_that_is_no_token_is_refused_before_a_text_needs_it(folder: Path) -> None:
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["unk_token"] = ""
    put(folder, "tokenizer.json", json.dumps(described))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the unknown token '' is not in the vocabulary"):
        load_tokenizer(folder)


def test_a_decoder_of_no_steps_is_refused_by_name(folder: Path) -> None:
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["decoder"] = {"type": "Sequence", "decoders": []}
    put(folder, "tokenizer.json", json.dumps(described))
    with pytest.raises(UnsupportedModelError, match=f"{folder}: the tokenizer's decoder"):
        load_tokenizer(folder)


def test_a_sentencepiece_token_of_a_million_characters_costs_no_million_cuts() -> None:
    vocab = {token: number for number, token in enumerate(("a", "b", "ab", "a" * 1_000_000))}
    started = time.process_time()
    assert merges_from_scores(vocab, [1] * 4, [0.0, 0.0, -1.0, -2.0]) == [("a", "b")]
    assert time.process_time() - started < 1.0


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model but no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="neither a folder nor"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"absent\.gguf: No such file"):
        load_tokenizer(tmp_path / "absent.gguf")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse()])])
def test_decoder_whose_tokens_depend_on_neighbours_is_refused(decoder: Any) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=r"decoder .* is not supported"):
        Tokenizer(TokenizerSpec(backend=backend))
