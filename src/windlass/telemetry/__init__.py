"""What a run records of itself: ledger, speed, devices, terminal, trackers."""
