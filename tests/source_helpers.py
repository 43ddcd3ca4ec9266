"""Files of every kind with the same texts, and what a source reads from them."""

import bz2
import csv
import gzip
import io
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
    rows = [("id", "text"), *((str(i), t) for i, t in enumerate(texts))]
    with io.StringIO(newline="") as out:
        csv.writer(out, delimiter=comma, quoting=csv.QUOTE_NONNUMERIC).writerows(rows)
        return "\ufeff" + out.getvalue()


def write_all(folder):
    """Writes the texts in every form; gives the sources that have them."""
    single = {"txt": bytes, "txt.gz": gzip.compress, "txt.xz": lzma.compress}
    single |= {"md.zst": zst, "md.bz2": lambda raw: bz2.compress(raw[:9]) + bz2.compress(raw[9:])}
    for ending, pack in single.items():
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02d}.{ending}").write_bytes(pack(text.encode()))
    raw = lines(TEXTS)
    for name, content in {
        "all.jsonl": b"\xef\xbb\xbf" + raw.replace(b"\n", b"\n\n", 3),
        "all.jsonl.gz": gzip.compress(raw[:300]) + gzip.compress(raw[300:]),
        "all.jsonl.zst": zst(raw),
        "all.jsonl.xz": lzma.compress(raw),
        "all.csv": cells(TEXTS, ",").encode(),
        "all.tsv": cells(TEXTS, "\t").encode(),
        "array.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
        "lines.json": b"\xef\xbb\xbf" + raw,
        "halves/a.jsonl": lines(TEXTS[:9]),
        "halves/c.jsonl.gz": gzip.compress(lines(TEXTS[12:])),
        "halves/notes.md": b"not a part of it",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    parquet(folder / "all.parquet", TEXTS)
    parquet(folder / "halves" / "b.parquet", TEXTS[9:12])
    names = [f"*.{ending}" for ending in single]
    return [*(str(folder / name) for name in names), *map(str, folder.glob("a*.*"))] + [
        str(folder / name) for name in ("lines.json", "halves")
    ]


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
