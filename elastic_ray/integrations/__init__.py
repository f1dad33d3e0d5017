"""Data and loops of other libraries in an elastic job; each module is loaded only when it is asked for."""
