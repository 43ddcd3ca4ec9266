"""Reports: tables, plots and one page from a run's own ledger. `write_report` is imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["write_report"]

if TYPE_CHECKING:
    from windlass.reports.write import write_report


def __getattr__(name: str) -> Any:
    if name != "write_report":
        raise AttributeError(f"module 'windlass.reports' has no attribute {name!r}")
    from windlass.reports.write import write_report

    return write_report
