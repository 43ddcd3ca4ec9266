"""Many processes as one: who am I, meshes, wrapping, reductions."""
