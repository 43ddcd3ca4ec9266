"""Studies: directories of runs that one recipe and a grid make. No torch.

For every study:
- `grid.py`: from typed axes to cells
- `study.py`: the directory, how it grows, presets of studies
- `runner.py`: the verb `sweep`; trains the open cells, as `process.py`; `progress.py` shows them
- `submit.py`: array jobs for the open cells
- `results.py`: a cell's state and numbers from its ledger, and the best cells

For scaling studies:
- `scale.py`: the verb `scale`, and its grid
- `probe.py`: steps without communication
- `setups.py`: the numbers of each setup, compared with the smallest

For ladders:
- `ladder.py`: the verb `ladder`, its grid and its answers
- `law.py`: the fit
"""
