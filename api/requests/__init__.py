"""What every route shares: authentication, limits, errors, response models, long polls, OpenAPI."""
