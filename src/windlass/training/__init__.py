"""Training: how a run starts, its loop, and how it stops."""
