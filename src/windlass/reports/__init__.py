"""Reports: what the ledgers of runs and studies say, as a page, tables and pictures. No torch.

- `view.py`: a run's curves and measures; `tracks.py`: columns along a run, and its clock
- `study.py`: a study with its runs
- `table.py` and `charts.py`: a table and a chart, for every drawer
- `tables.py` and `run_charts.py`: of runs; `scaling.py` and `law.py`: of these studies
- `published.py`: the tables of published work
- `head.py`: the five answers
- `contents.py`: all of it for one report; `write.py`: its files
- `page.py` with `page.html`, `page.css`, `page.js` and `chart.js`; `plots.py`: pictures for paper
- `curve.py`: a loss curve in the terminal; `overview.py`: the list of runs
"""
