"""Images in classes, of which episodes are drawn."""
