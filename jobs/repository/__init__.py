"""What a tenant calls: submit, read, list, cancel; results; the history of events."""
