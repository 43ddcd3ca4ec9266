"""The grid of memory in short: the best layout for each number of ranks and precision, with and without offload."""

from __future__ import annotations

from typing import Any

SHORT = {"none": "", "selective": " selective", "full": " full"}


def grid_table(table: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Head, rows and notes, from the rows of `windlass.estimate.grid.memory_grid`."""
    offload = any(row["offload"] for row in table)
    rows = []
    for world in dict.fromkeys(row["world"] for row in table):
        for precision in dict.fromkeys(row["precision"] for row in table):
            plain = best_of(table, world, precision, offload=False)
            moved = best_of(table, world, precision, offload=True)
            cells = [str(world), precision, *_cells(plain)]
            if offload:
                cells += [*_cells(moved), _gb(moved["host_bytes"]) if moved else ""]
            rows.append(tuple(cells))
    head: tuple[str, ...] = ("ranks", "prec.", "best layout", "GB", "fits")
    if offload:
        head += ("with offload", "GB", "fits", "host")
    notes = [
        "The cheapest that fits with the recipe's micro-batch, else the smallest; `selective`, `full`: recomputation. "
        "--json has every layout."
    ]
    return head, rows, notes


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    fits = {True: "yes", False: "no", None: "?"}[row["fits"]]
    return row["strategy"] + SHORT[row["checkpointing"]], _gb(row["total_bytes"]), fits


def _gb(value: int) -> str:
    return f"{value / 1e9:.2f}" if value < 1e11 else f"{value / 1e9:,.0f}"


def best_of(table: list[dict[str, Any]], world: int, precision: str, offload: bool) -> dict[str, Any] | None:
    """Of a world, a precision and with or without offload: the cheapest row that fits, or else the smallest."""
    rows = [r for r in table if (r["world"], r["precision"], r["offload"]) == (world, precision, offload)]
    fitting = next((r for r in rows if r["fits"]), None)
    return fitting or min(rows, key=lambda r: r["total_bytes"], default=None)
