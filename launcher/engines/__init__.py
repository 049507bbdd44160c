"""The engines that hold hosts: how commands get there by SSH, by Slurm, by Ray; and what else they do for a run."""
