"""Reports of runs and studies from their ledgers: a page, tables and pictures. No torch."""
