"""The adaptive batch core: noise scale, learning-rate rules and batch tuner (all pure), and gradient
statistics (torch)."""
