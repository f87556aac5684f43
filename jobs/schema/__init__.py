"""Tables, connections, the database's clock and identifiers."""
