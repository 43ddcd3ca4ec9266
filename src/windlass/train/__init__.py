"""The training: state, step, loop, guard."""
