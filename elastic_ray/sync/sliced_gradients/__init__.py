"""Gradients sliced over ranks: each rank receives the mean only for parts whose optimizer state it owns (ZeRO-2)."""
