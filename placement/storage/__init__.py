"""Files of this machine and calls on storage that may never answer."""
