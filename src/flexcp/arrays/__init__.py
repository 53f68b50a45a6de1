"""Arrays: arithmetic on columns of integers, and decorators for compiled loops. Nothing here is about attention."""
