"""The functions for tenants: submit, read, list and cancel jobs; results; events."""
