"""Reports: what the ledgers of runs and studies say, as a page, tables and pictures. No torch."""
