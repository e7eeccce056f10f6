"""Writes golden_tokens.json: what llama.cpp and SentencePiece make of some texts; needs no part of this project.

  python make_golden_tokens.py sentencepiece              first; needs sentencepiece
  python make_golden_tokens.py llama_cpp MODEL.gguf       then; needs llama-cpp-python and gguf; MODEL: SmolLM2's file

The byte-level half runs llama.cpp on the model's own vocabulary under each pre-tokenizer name. The SentencePiece half
is a vocabulary of 400 pieces trained here on the texts below. Left out are the texts on which llama.cpp only
approximates the original pre-tokenizers: combining marks (tekken, gpt-4o; it does not normalise qwen2's) and the
ideographic space (deepseek-llm).
"""

import json
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden_tokens.json")
NAMES = [
    *("codeshell", "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-v3", "default", "exaone", "falcon"),
    *("falcon3", "gpt-2", "gpt-4o", "llama-bpe", "llama4", "olmo", "qwen2", "refact", "smaug-bpe", "smollm"),
    *("stablelm2", "starcoder", "tekken"),
]
TEXTS = [
    "Hello, world!",
    "  two spaces lead,\tone tab, trailing  ",
    "a\n\n\nb\r\nc \n d",
    "12345678 3.14159 0x1F ½ ² Ⅷ ٣٤",
    "don't WE'LL I've 'S 's '' a'sb",
    "naïve café Straße ÀÖØ ƻ ǅ ʰ",
    "日本語のテキスト。 中文，标点！ 한국어 텍스트",
    "مرحبا שלום Привет ბარემ Հայերեն",
    "😀😃 👩‍👩‍👧‍👦 🇫🇷x",
    "snake_case camelCase HTTPServer2 x=1+2*3; {'k': [v]}",
    "def f(x):\n    return x ** 2  # why\n",
    "https://a.b/c?d=e&f=%20#g user@host.org",
    "$100 <= £5 ~ ^ | `code` @ #tag !!!???",
    "\x00\x01\x1f\x7f end",
    "<|im_start|>user\nhi<|im_end|>",
]
PLAIN_TEXTS = [
    "the cat sat on the mat",
    " the  cat",
    "cat",
    "",
    " ",
    "Straße und Gasse",
    "日本 語",
    "naïve 😀 x",
    "a\nb\tc",
    "the<0x41>cat",
    "▁the cat",
]
ADDED_TEXTS = ["<tool>the cat", "the<tool> cat<|end|>sat", "<|end|> the"]
CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a quick brown fox jumps over the lazy dog while the cat naps",
    "die Straße und die Gasse und das Wasser und der Hund",
    "日本語 の 文 と 日本 の 猫",
    "she sells sea shells on the sea shore and the shells she sells are sea shells",
    "there is no place like home and no time like the present, said the other one",
]


def train_sentencepiece() -> dict:
    import sentencepiece  # noqa: PLC0415 - each half runs where only its own library is installed

    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/golden"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20),
            model_prefix=prefix,
            model_type="bpe",
            vocab_size=400,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            control_symbols=["<|end|>"],
            user_defined_symbols=["<tool>"],
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    ids = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 4 if p == "<tool>" else 1
        for i, p in enumerate(model.id_to_piece(i) for i in ids)
    ]
    byte_ids = {byte: model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    broken = [b"\xf0\x9f\x98\x80!", b"\xf0\x9f\x98!", b"\xff\xe6\x97", b"a\x80\x80\xe6\x97\xa5b"]
    sequences = [[byte_ids[byte] for byte in raw] for raw in broken]
    return {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": kinds,
        "encoded": {text: model.encode(text) for text in PLAIN_TEXTS},
        "decoded_bytes": [[sequence, model.decode(sequence)] for sequence in sequences],
    }


def run_llama_cpp(model_path: str, sentencepiece_golden: dict) -> tuple[dict, dict]:
    from gguf import GGUFReader, GGUFWriter  # noqa: PLC0415
    from llama_cpp import Llama  # noqa: PLC0415

    fields = GGUFReader(model_path).fields

    def tokenize(fill, texts: list[str]) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            writer = GGUFWriter(f"{folder}/vocabulary.gguf", "llama")
            fill(writer)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            model = Llama(f"{folder}/vocabulary.gguf", vocab_only=True, verbose=False)
            return {text: model.tokenize(text.encode(), add_bos=False, special=True) for text in texts}

    def byte_level(name: str):
        def fill(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(name)
            writer.add_token_list(fields["tokenizer.ggml.tokens"].contents())
            writer.add_token_types(fields["tokenizer.ggml.token_type"].contents())
            writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())

        return fill

    def sentencepiece_bpe(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(sentencepiece_golden["tokens"])
        writer.add_token_scores(sentencepiece_golden["scores"])
        writer.add_token_types(sentencepiece_golden["token_type"])

    return (
        {name: list(tokenize(byte_level(name), TEXTS).values()) for name in NAMES},
        tokenize(sentencepiece_bpe, PLAIN_TEXTS + ADDED_TEXTS),
    )


def main() -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if sys.argv[1] == "sentencepiece":
        golden["sentencepiece"] = train_sentencepiece()
    else:
        byte_level, encoded = run_llama_cpp(sys.argv[2], golden["sentencepiece"])
        golden["byte_level"] = {"texts": TEXTS, "encoded": byte_level}
        golden["sentencepiece"]["encoded_by_llama_cpp"] = encoded
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
