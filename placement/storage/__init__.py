"""Local files, and calls on storage that may never answer."""
