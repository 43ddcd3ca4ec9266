"""Tables, plots and the page of runs and studies."""
