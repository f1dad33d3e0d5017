"""Where a page takes its facts from: a cluster that runs, the files of runs, a report of the simulator."""
