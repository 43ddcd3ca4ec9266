"""Studies: directories of runs that one recipe and a grid make."""
