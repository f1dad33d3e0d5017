"""Adaptive batch core: noise scale, learning-rate rules, batch tuner (all pure); statistics (torch)."""
