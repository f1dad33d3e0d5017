"""Sources of a page: a cluster that runs, the files of runs, a report of the simulator."""
