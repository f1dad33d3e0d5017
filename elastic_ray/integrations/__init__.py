"""Data and loops of other libraries in an elastic job: that library is loaded only when it is asked for."""
