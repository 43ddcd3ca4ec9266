"""What a run says of itself: ledger, speed, devices, terminal, trackers."""
