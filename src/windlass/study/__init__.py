"""Many runs as one: grids and sweeps."""
