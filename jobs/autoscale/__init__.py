"""Machines for waiting jobs, started through a launcher: Slurm, Kubernetes, or any command."""
