"""Reports: tables, plots and one page from a run's own ledger. No torch; matplotlib only where a plot is drawn."""
