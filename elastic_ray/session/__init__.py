"""Session of a train function in one process: its steps, votes and changes of group."""
