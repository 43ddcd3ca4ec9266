"""The records of a run: ledger, speed, devices, terminal, trackers."""
