"""Stragglers: detecting slow workers and the cause, giving them smaller shares, and replacing them."""
