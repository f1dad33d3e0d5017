"""Local files, and calls to storage that may never return."""
