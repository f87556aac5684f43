"""Files of tensors and tables: artifacts, matrices of the caller, and the check of their headers."""
