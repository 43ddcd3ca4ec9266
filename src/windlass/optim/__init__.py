"""The optimizer: parameter groups, schedules, Muon."""
