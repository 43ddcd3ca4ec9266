"""Reports: tables, plots and one page from a run's ledger. No torch."""
