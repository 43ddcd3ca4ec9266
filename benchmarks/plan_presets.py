"""What `windlass plan` says of the presets that need no download: a table in Markdown.

python benchmarks/plan_presets.py
"""

from __future__ import annotations

from windlass import plan

CASES = [
    ("quickstart", [], 1, "RTX-4090"),
    ("shakespeare-char", ["model.vocab=65"], 1, "RTX-4090"),
    ("c4-29m", [], 2, "A100-40GB"),
    ("c4-30m", [], 2, "A100-40GB"),
    ("gpt2-124m", [], 4, "A100-80GB"),
    ("gpt-squad", [], 1, "A100-80GB"),
]


def main() -> None:
    """Print a row a preset, in the preset's own layout."""
    print("| preset | device | parameters | steps | tokens per parameter | GB | checkpoint MB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, settings, world, device in CASES:
        p = plan(name, settings, world=world, device=device)
        steps = f"{p.steps:,}" if p.steps else "5 epochs"
        ratio = f"{p.tokens / p.size.parameters:.3g}" if p.tokens else "–"
        own = next(row for row in p.memory if row.chosen)
        print(
            f"| `{name}` | {world} x {device} | {p.size.parameters:,} | {steps} | {ratio}"
            f" | {own.memory.total / 1e9:.2f} | {p.size.checkpoint_bytes / 1e6:,.0f} |"
        )


if __name__ == "__main__":
    main()
