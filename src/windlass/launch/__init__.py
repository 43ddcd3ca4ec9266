"""Starting processes: local ranks, schedulers."""
