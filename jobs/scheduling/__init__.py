"""Which job runs next (fair share, deadlines) and on which device it fits."""
