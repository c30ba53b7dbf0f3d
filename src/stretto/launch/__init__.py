"""Starting ranks: this machine, torchrun, Slurm, TF_CONFIG."""
