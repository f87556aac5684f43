"""Archives of ended jobs, and the deletion of objects that nothing refers to any more."""
