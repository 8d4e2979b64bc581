"""`launch sweep`: a grid becomes points, each run once, here or as Slurm job arrays."""
