"""From torchrun, srun or plain Python to a rank that is ready to run: rendezvous, process groups, signals."""
