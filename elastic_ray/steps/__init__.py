"""Which step this rank is in, how long steps take, and what of them counts."""
