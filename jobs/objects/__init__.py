"""Storage of artifacts and checkpoints: a folder, or an S3 bucket."""
