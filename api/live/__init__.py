"""Server-sent events: one poll of the database shared by all readers."""
