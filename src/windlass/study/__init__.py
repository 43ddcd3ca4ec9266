"""Many runs as one: grids and sweeps."""

GRID_HELP = """\
    optim.lr=1e-2,1e-3,1e-4              three values
    optim.lr=1e-4:1e-2:log:5             five values from 1e-4 to 1e-2, evenly on a logarithmic axis
    model.width=128:512:lin:4            four values evenly on a linear axis (whole numbers stay whole)
    optim.lr+train.global_batch=1e-3+64,5e-4+128
                                         a zip: both change together, two values
    run.seed=1,2,3                       seeds: the table adds medians and spread
    parallel.strategy=ddp,full_shard     any setting of a recipe, also those that change no result
    parallel.world=1,2,4                 the ranks of a cell: no setting, but an axis; goes before --world
"""
"""What can be typed as an axis."""
