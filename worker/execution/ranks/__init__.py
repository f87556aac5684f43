"""Several processes of one job: the launcher that starts the ranks, the link between them, and each rank's part."""
