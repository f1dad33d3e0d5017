"""Loops and data of other libraries in elastic jobs: each module is loaded only when it is asked for."""
