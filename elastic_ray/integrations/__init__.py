"""Loops that others have written, under elastic-ray: each module is loaded only when it is asked for."""
