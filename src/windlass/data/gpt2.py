"""GPT-2's vocabulary: its stand-in letters for bytes, its pieces in the order they were merged, and where the files come from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from windlass.errors import UserError, first_line

END_OF_TEXT = "<|endoftext|>"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts a text into words before pairs are merged (Radford et al. 2019, released code)."""
MERGES_FILE, IDS_FILE = "vocab.bpe", "encoder.json"

Ids = dict[bytes, int]
"""The id of each piece, which is also the order in which the pieces were merged."""
Merges = list[tuple[bytes, bytes]]
"""The pair that each piece past the single bytes was merged from, in order."""


def byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte: printable Latin-1 is itself, the rest are counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(b): b for b in printable}
    for place, b in enumerate(b for b in range(256) if b not in set(printable)):
        letters[chr(0x100 + place)] = b
    return letters


def read_vocabulary(folder: Path) -> tuple[Ids, Merges]:
    """The pieces of `vocab.bpe` and `encoder.json`; raises UserError where the two are missing or do not match."""
    for name in (MERGES_FILE, IDS_FILE):
        if not (folder / name).is_file():
            raise UserError(
                f"data.tokenizer: there is no {name} in {folder}; GPT-2's tokenizer is vocab.bpe and encoder.json"
            )
    letters = byte_letters()
    try:
        tree = json.loads((folder / IDS_FILE).read_text(encoding="utf-8"))
        tree.pop(END_OF_TEXT, None)
        ids = {bytes(letters[c] for c in piece): int(i) for piece, i in tree.items()}
        lines = (folder / MERGES_FILE).read_text(encoding="utf-8").split("\n")
        pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
        merges = [(bytes(letters[c] for c in a), bytes(letters[c] for c in b)) for a, b in pairs]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.tokenizer: {folder} does not hold GPT-2's vocab.bpe and encoder.json: {error}") from None
    in_order = sorted(ids, key=ids.__getitem__)
    if sorted(ids.values()) != list(range(len(ids))) or in_order[256:] != [a + b for a, b in merges]:
        raise UserError(f"data.tokenizer: vocab.bpe and encoder.json in {folder} do not belong together")
    return ids, merges


def download_vocabulary() -> tuple[Ids, Merges]:
    """The pieces through `tiktoken`, which downloads them once; raises UserError where it cannot."""
    import tiktoken

    try:
        ids = dict(tiktoken.get_encoding("gpt2")._mergeable_ranks)
    except Exception as error:  # whatever the library behind the download raises
        raise UserError(
            f"data.tokenizer: GPT-2's vocabulary could not be downloaded ({type(error).__name__}: {first_line(error)}); "
            'put vocab.bpe and encoder.json into a directory and write "gpt2:DIR"'
        ) from None
    return ids, [_halves(piece, ids) for piece in sorted(ids, key=ids.__getitem__) if len(piece) > 1]


def _halves(piece: bytes, ids: Ids) -> tuple[bytes, bytes]:
    """The two pieces that a piece was merged from: what is left of it when only earlier merges are made."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        _, i = min((ids.get(a + b, len(ids)), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]
