"""Arithmetic from a recipe: compute-optimal sizes, memory, time."""
