"""Checkpoints: committed whole or not at all, loaded on any world size, removed by rule."""
