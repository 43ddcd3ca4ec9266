"""Files of every kind with the same texts, and what a source reads from them."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq

from windlass.data.items import record_of, text_of
from windlass.data.recipe_sources import SourceSpec
from windlass.data.sources import open_source

TEXTS = [f"document {i} \u00e9\u4e2d\U0001f642\n" * (i % 5) for i in range(23)]
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def lines(texts, key="text"):
    return "".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)).encode()


def zst(raw, frames=3):
    size = max(1, -(-len(raw) // frames))
    parts = [raw[i : i + size] for i in range(0, len(raw) or 1, size)]
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in parts)


def parquet(path, texts, key="text"):
    table = pa.table({"id": list(range(len(texts))), key: pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=5)
    return path.read_bytes()


def cells(texts, comma):
    quoted = ('"' + text.replace('"', '""') + '"' for text in texts)
    return "\ufeff" + "".join(
        f"{comma.join(row)}\r\n" for row in [("id", "text"), *enumerated(quoted)]
    )


def enumerated(texts):
    return [(str(i), text) for i, text in enumerate(texts)]


def write_all(folder):
    for i, text in enumerate(TEXTS):
        raw = text.encode()
        (folder / f"{i:02d}.txt").write_bytes(raw)
        (folder / f"{i:02d}.txt.gz").write_bytes(gzip.compress(raw))
        (folder / f"{i:02d}.md.zst").write_bytes(zst(raw, 2))
        (folder / f"{i:02d}.txt.xz").write_bytes(lzma.compress(raw))
        (folder / f"{i:02d}.md.bz2").write_bytes(bz2.compress(raw[:9]) + bz2.compress(raw[9:]))
    raw = lines(TEXTS)
    (folder / "all.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\n\n", 3))
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(raw[:300]) + gzip.compress(raw[300:]))
    (folder / "all.jsonl.zst").write_bytes(zst(raw))
    (folder / "all.jsonl.xz").write_bytes(lzma.compress(raw))
    (folder / "all.csv").write_text(cells(TEXTS, ","), newline="")
    (folder / "all.tsv").write_text(cells(TEXTS, "\t"), newline="")
    records = [{"text": text} for text in TEXTS]
    (folder / "array.json").write_text(json.dumps(records, indent=1))
    (folder / "lines.json").write_bytes(b"\xef\xbb\xbf" + raw)
    parquet(folder / "all.parquet", TEXTS)
    half = folder / "halves"
    half.mkdir()
    (half / "a.jsonl").write_bytes(lines(TEXTS[:9]))
    parquet(half / "b.parquet", TEXTS[9:12])
    (half / "c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[12:])))
    (half / "notes.md").write_text("not a part of it")
    names = "*.txt *.txt.gz *.txt.xz *.md.zst *.md.bz2 all.jsonl all.jsonl.gz all.jsonl.zst"
    names += " all.jsonl.xz all.csv all.tsv array.json lines.json all.parquet halves"
    return [str(folder / name) for name in names.split()]


def spec_of(source, **settings):
    return SourceSpec(str(source), str(source), **settings)


def opened(source, notes=None, **settings):
    return open_source(spec_of(source, **settings), [].append if notes is None else notes.append)


def read(source, start=0, **settings):
    """The documents of a source from `start` on, their blocks joined."""
    texts, continues = [], False
    found = opened(source, **settings)
    for item in found.items(start):
        text = text_of(item, found.spec)
        texts[-1:] = [texts[-1] + text] if continues else [*texts[-1:], text]
        continues = item.more
    assert not continues
    return texts


def records(source, **settings):
    found = opened(source, **settings)
    return [record_of(item) for item in found.items()]
