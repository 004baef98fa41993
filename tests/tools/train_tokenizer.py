"""Trains the small byte-level BPE tokenizer that `src/prompt/builtin/` ships.

Needs the PyPI package `tokenizers` (any 0.2x); run it from the repository root, in a virtual
environment outside the repository:

    python -m venv /tmp/tok && /tmp/tok/bin/pip install tokenizers
    /tmp/tok/bin/python tests/tools/train_tokenizer.py [more source folders]

The training text is this project's own: `tests/data/prompt/corpus.txt` and the Rust sources. The
result is not byte-for-byte reproducible once the sources have moved on, and need not be: every
test reads the committed file. With `--golden`, keeps the tokenizer and only writes
`tests/data/prompt/tokens.golden.json` anew: for each text of `texts.json` the ids without and with
special tokens, as the Python library gives them.
"""

import json
import pathlib
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TARGET = pathlib.Path("src/prompt/builtin/tokenizer.json")
VOCABULARY = 6000
SPECIAL = [
    "<|bos|>",
    "<|eos|>",
    "<|turn|>",
    "<|end|>",
    "<|tool_call|>",
    "<|tool_call_end|>",
    "<|think|>",
    "<|think_end|>",
]
# The usual split of byte-level tokenizers: contractions, words, up to three digits, punctuation,
# line ends, spaces. Spelt as the Rust reader recognises it, so that no regex engine is needed.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(folders):
    """The prose three times (chat traffic looks like it), then the sources."""
    prose = pathlib.Path("tests/data/prompt/corpus.txt").read_text(encoding="utf-8")
    yield from [prose] * 3
    sources = set()
    for folder in folders:
        for path in pathlib.Path(folder).rglob("*.rs"):
            sources.add(path.read_text(encoding="utf-8"))
    yield from sorted(sources)


def write_golden(tokenizer):
    data = pathlib.Path("tests/data/prompt")
    golden = [
        {
            "text": text,
            "plain": tokenizer.encode(text, add_special_tokens=False).ids,
            "special": tokenizer.encode(text).ids,
        }
        for text in json.loads((data / "texts.json").read_text(encoding="utf-8"))
    ]
    lines = ",\n".join(json.dumps(entry) for entry in golden)
    (data / "tokens.golden.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def train(folders):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(folders), trainer)
    bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B:1", special_tokens=[bos]
    )
    document = json.loads(tokenizer.to_str())
    TARGET.write_text(
        json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(tokenizer.get_vocab_size(), "entries,", TARGET.stat().st_size, "bytes")


def main():
    folders = sys.argv[1:] or ["src"]
    if folders != ["--golden"]:
        train(folders)
    write_golden(Tokenizer.from_file(str(TARGET)))


if __name__ == "__main__":
    main()
