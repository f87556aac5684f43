"""The parts of a request that all routes share: authentication, limits, errors, bodies, long polls, OpenAPI."""
