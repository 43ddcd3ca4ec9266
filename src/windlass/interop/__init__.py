"""To and from Hugging Face directories: export a run, start a run from weights."""
