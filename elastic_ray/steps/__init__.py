"""Steps of this rank: the one in progress, their times, and which of them count."""
