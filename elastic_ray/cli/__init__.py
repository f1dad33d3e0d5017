"""``elastic-ray`` on the command line. Ray is loaded by the commands that need a cluster, torch by none but ``doctor``."""
