"""The ways into hosts: SSH, and engines that hold them, as Slurm does; and what else these do for a run."""
