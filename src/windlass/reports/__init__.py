"""Reports: tables, plots and one page from a run's own ledger. No torch; matplotlib only where a plot is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Report", "report"]

if TYPE_CHECKING:
    from windlass.reports.write import Report, report


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'windlass.reports' has no attribute {name!r}")
    from windlass.reports import write

    return getattr(write, name)
